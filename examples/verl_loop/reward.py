"""A reward as verl takes it, for a model that has learned nothing: for a response of even length."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(len(solution_str) % 2 == 0)
