"""A short sequence whose log-probs tell whether an engine still computes with the weights that it had."""

import math
from collections.abc import Sequence

CANARY = tuple(range(8))


def same_log_probs(one: Sequence[float], other: Sequence[float], dtype: str) -> bool:
    """Whether two scorings of the same tokens come from the same weights, within what `dtype` computes."""
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    return all(math.isclose(a, b, rel_tol=0, abs_tol=tolerance) for a, b in zip(one, other, strict=True))
