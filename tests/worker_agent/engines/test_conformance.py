"""What every engine behind the Protocol does, measured against the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worker_agent.adapters import EVERY_MODULE, SHAPES, draw_adapter
from tests.worker_agent.engines import corruption
from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import Engine, EngineError, Policy, Prompt, Sampling, generate, sample_seed
from worker_agent.engines.lora_digest import AdapterError, check_adapter, digest_of_folder, lora_layout
from worker_agent.engines.transformers_engine import TransformersEngine

NewPolicy = Callable[[int], Policy]
PROMPT = tuple(range(20, 60))  # longer than one block of the prefix cache
END = 2
# Of two engines that are both so close to the reference no log-probs differ by more than 1e-4.
FROM_REFERENCE = 5e-5


def sequences(count: int = 4) -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [[*PROMPT, *draw.integers(3, 400, size=20).tolist()] for _ in range(count)]


def largest_difference(a: list[list[float]], b: list[list[float]]) -> float:
    return max(abs(x - y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def test_it_says_what_it_is(each: Engine) -> None:
    assert (each.logprobs_mode, each.dtype) == ("raw", "float32")
    assert each.version[0].isdigit()
    assert {"base", "lora"} <= set(each.kinds) <= {"base", "lora", "full"}


def test_render_is_the_models_own_template(each: Engine, tiny_model: Path) -> None:
    ids = each.render([{"role": "user", "content": "1 + 2 ="}])
    text = AutoTokenizer.from_pretrained(tiny_model).decode(ids)
    assert text == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"


def test_generated_log_probs_equal_scored_ones_and_the_references(each: Engine, reference: TransformersEngine) -> None:
    prompts = [Prompt(PROMPT, seed=1, samples=3), Prompt((5, 6, 7), seed=2, samples=2)]
    for sampling in (Sampling(), Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.01)):
        completions = generate(each, BASE, prompts, sampling)
        assert [len(samples) for samples in completions] == [3, 2]
        for prompt, samples in zip(prompts, completions, strict=True):
            rows = [[*prompt.token_ids, *c.token_ids] for c in samples]
            scored = each.score(BASE, rows)
            rest = [log_probs[len(prompt.token_ids) :] for log_probs in scored]
            assert largest_difference([c.log_probs for c in samples], rest) < 1e-5
            assert all(log_probs[0] == 0.0 and max(log_probs[1:]) < 0 for log_probs in scored)
            assert largest_difference(scored, reference.score(BASE, rows)) < FROM_REFERENCE


def test_greedy_completions_are_the_references(each: Engine, reference: TransformersEngine) -> None:
    prompts = [Prompt(tuple(row[:length]), 1, 1) for row, length in zip(sequences(), (3, 17, 40, 60), strict=True)]
    greedy = Sampling(temperature=0.0, max_tokens=24)
    ours, theirs = generate(each, BASE, prompts, greedy), generate(reference, BASE, prompts, greedy)
    assert [c.token_ids for (c,) in ours] == [c.token_ids for (c,) in theirs]
    assert [c.text for (c,) in ours] == [c.text for (c,) in theirs]


def test_samples_are_independent_and_reproducible(each: Engine) -> None:
    def drawn(prompts: list[Prompt]) -> list[tuple[int, ...]]:
        return [tuple(c.token_ids) for samples in generate(each, BASE, prompts, Sampling()) for c in samples]

    together = drawn([Prompt(PROMPT, seed=seed, samples=4) for seed in (7, 8, 9)])
    assert len(set(together)) == 12  # neighbouring seeds share no stream
    assert drawn([Prompt(PROMPT, seed=8, samples=4)]) == together[4:8]  # whatever else was in the batch
    assert drawn([Prompt(PROMPT, seed=8, samples=2)]) == together[4:6]
    assert 0 <= sample_seed(8, 0) < 2**63 and sample_seed(8, 0) != sample_seed(7, 1)


@pytest.mark.parametrize(
    "narrow", [{"top_k": 3}, {"top_p": 0.02}, {"min_p": 0.25}], ids=lambda narrow: next(iter(narrow))
)
def test_truncation_draws_from_the_likeliest_alone(each: Engine, tiny_model: Path, narrow: dict[str, float]) -> None:
    """The log-probs stay those of the whole distribution."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        log_probs, ranked = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], dim=-1).sort(descending=True)
    probs = log_probs.exp()
    count = {
        "top_k": 3,
        "top_p": 1 + int((probs.cumsum(0) < 0.02).sum()),
        "min_p": int((probs >= 0.25 * probs[0]).sum()),
    }[next(iter(narrow))]
    likeliest = dict(zip(ranked[:count].tolist(), log_probs[:count].tolist(), strict=True))
    (cut,) = generate(each, BASE, [Prompt(PROMPT, 1, 40)], Sampling(max_tokens=1, **narrow))  # type: ignore[arg-type]
    assert {c.token_ids[0] for c in cut} <= likeliest.keys() and len({c.token_ids[0] for c in cut}) > 1
    assert all(abs(c.log_probs[0] - likeliest[c.token_ids[0]]) < FROM_REFERENCE for c in cut)
    (whole,) = generate(each, BASE, [Prompt(PROMPT, 1, 40)], Sampling(max_tokens=1))
    assert not {c.token_ids[0] for c in whole} <= likeliest.keys()


def test_the_end_token_is_part_of_the_completion(each: Engine) -> None:
    samples = generate(each, BASE, [Prompt((5, 6, 7), seed=3, samples=8)], Sampling(max_tokens=48))[0]
    ended = [c for c in samples if c.finish_reason == "stop"]
    assert ended and len(ended) < len(samples)
    assert all(c.token_ids[-1] == END and len(c.log_probs) == len(c.token_ids) for c in ended)
    assert all(c.finish_reason == "length" and len(c.token_ids) == 48 for c in samples if END not in c.token_ids)


def test_a_stop_text_ends_the_completion(each: Engine) -> None:
    samples = generate(each, BASE, [Prompt((5, 6, 7), 3, 8)], Sampling(max_tokens=48, stop=("1", "2")))[0]
    assert any(c.finish_reason == "stop" for c in samples)
    assert not any(digit in c.text for c in samples for digit in "12")


def test_a_completion_ends_where_the_model_does(each: Engine) -> None:
    (samples,) = generate(each, BASE, [Prompt((5,) * 120, 1, 2)], Sampling(max_tokens=20))
    assert [(len(c.token_ids), c.finish_reason) for c in samples] == [(8, "length")] * 2


def test_adapters_take_turns_and_each_is_the_references(
    each: Engine, reference: TransformersEngine, policies: NewPolicy
) -> None:
    """The prompt's cached prefix under one policy must not serve another."""
    versions = [BASE, policies(1), policies(2)]
    for policy in versions:
        report = each.load(policy)
        assert (report.served_version, report.served_hash) == (policy.version, policy.artifact_hash)
        reference.load(policy)
    first: dict[int, Any] = {}
    for policy in [*versions, *versions]:
        (samples,) = generate(each, policy, [Prompt(PROMPT, seed=11, samples=2)], Sampling())
        rows = [[*PROMPT, *c.token_ids] for c in samples]
        scored = each.score(policy, rows)
        assert largest_difference([c.log_probs for c in samples], [x[len(PROMPT) :] for x in scored]) < 1e-5
        assert largest_difference(scored, reference.score(policy, rows)) < FROM_REFERENCE
        assert first.setdefault(policy.version, samples) == samples
    rows = sequences()
    per_policy = [each.score(policy, rows) for policy in versions]
    assert min(largest_difference(per_policy[i], per_policy[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-2
    for policy in versions[1:]:
        reference.unload(policy)


def test_the_digest_is_the_folders_and_the_same_after_every_load(each: Engine, policies: NewPolicy) -> None:
    one, two = policies(1), policies(2)
    for policy in (one, two):
        assert policy.folder is not None
        expected = digest_of_folder(policy.folder, each.dtype)
        digest = each.load(policy).digest
        assert digest is not None
        assert (digest.registered, digest.active) == (expected, expected)
        assert digest.layout == lora_layout(each.name, each.version, each.dtype)
        assert each.load(policy).digest == digest  # it was there already
        each.unload(policy)
        assert each.load(policy).digest == digest
    assert each.load(one).digest != each.load(two).digest


def test_an_adapter_may_have_every_linear_module(
    each: Engine, reference: TransformersEngine, policies: NewPolicy, tmp_path: Path
) -> None:
    """Also those that vLLM packs together, as gate and up."""
    few, folder = policies(1), draw_adapter(tmp_path / "every", 7, tuple(SHAPES), rank=8)
    every = Policy(few.run_id, 2, "sha256:2", "lora", folder)
    each.load(few)
    digest = each.load(every).digest
    assert digest is not None
    assert digest.registered == digest.active == digest_of_folder(folder, each.dtype)
    reference.load(every)
    assert largest_difference(each.score(every, sequences()), reference.score(every, sequences())) < FROM_REFERENCE
    for engine in {id(each): each, id(reference): reference}.values():
        engine.unload(every)


@pytest.mark.parametrize("room", ["modules", "rank"])
def test_an_adapter_that_an_engine_has_no_room_for_is_said_to_be_one(tmp_path: Path, room: str) -> None:
    folder = draw_adapter(tmp_path / "v1", 1, tuple(SHAPES))
    modules, rank = (("q_proj", "v_proj"), 16) if room == "modules" else (EVERY_MODULE, 8)
    said = r"down_proj.*lora_target_modules \[.*\"k_proj\"" if room == "modules" else "rank 16.*max_lora_rank"
    with pytest.raises(AdapterError, match=said):
        check_adapter(folder, modules, rank)
    check_adapter(folder, EVERY_MODULE, 16)


def test_of_the_base_model_a_digest_is_given_where_the_weights_can_be_read(each: Engine, policies: NewPolicy) -> None:
    before = each.load(BASE).digest
    assert (before is not None) == (each.name == "transformers")
    each.load(policies(1))
    assert each.load(BASE).digest == before


def test_other_weights_under_the_same_name_are_served(each: Engine, policies: NewPolicy, tmp_path: Path) -> None:
    policy = policies(1)
    before = each.load(policy).digest
    generate(each, policy, [Prompt(PROMPT, 1, 1)], Sampling())
    each.unload(policy)
    other = Policy(policy.run_id, policy.version, policy.artifact_hash, "lora", draw_adapter(tmp_path / "other", 9))
    assert each.load(other).digest != before
    (samples,) = generate(each, other, [Prompt(PROMPT, 1, 2)], Sampling())
    scored = each.score(other, [[*PROMPT, *c.token_ids] for c in samples])
    assert largest_difference([c.log_probs for c in samples], [x[len(PROMPT) :] for x in scored]) < 1e-5


def test_the_adapter_in_use_is_not_the_one_to_go(each: Engine, policies: NewPolicy) -> None:
    one, two, three = policies(1), policies(2), policies(3)
    each.load(one)
    each.load(two)
    generate(each, one, [Prompt(PROMPT, 1, 1)], Sampling())
    each.load(three)
    assert each.score(one, sequences(1)) != each.score(three, sequences(1))


def test_what_was_unloaded_is_not_served(each: Engine, policies: NewPolicy) -> None:
    policy = policies(1)
    before = each.score(BASE, sequences(1))
    with pytest.raises(EngineError, match=r"version 1 .* is not loaded"):
        each.score(policy, sequences(1))
    each.load(policy)
    each.unload(policy)
    each.unload(policy)
    with pytest.raises(EngineError, match=r"version 1 .* is not loaded"):
        generate(each, policy, [Prompt(PROMPT, 1, 1)], Sampling())
    with pytest.raises(EngineError, match=r"version 1 .* is not loaded"):
        each.score(policy, sequences(1))
    each.unload(BASE)
    assert each.score(BASE, sequences(1)) == before


@pytest.mark.parametrize("corrupt", corruption.ALL)
def test_a_corrupted_adapter_is_refused_and_the_old_one_stays(
    each: Engine, policies: NewPolicy, corrupt: Callable[[Path], None]
) -> None:
    good, bad = policies(1), policies(2)
    each.load(good)
    before = each.score(good, sequences(1))
    assert bad.folder is not None
    corrupt(bad.folder)
    with pytest.raises(EngineError):
        each.load(bad)
    with pytest.raises(EngineError, match="not loaded"):
        each.score(bad, sequences(1))
    assert each.score(good, sequences(1)) == before


@pytest.mark.parametrize("length", [0, 128])
def test_a_sequence_that_does_not_fit_is_refused(each: Engine, length: int) -> None:
    with pytest.raises(EngineError, match=f"sequence 0 has {length} tokens"):
        each.score(BASE, [[5] * length])
    with pytest.raises(EngineError, match=f"sequence 0 has {length} tokens"):
        generate(each, BASE, [Prompt((5,) * length, 1, 1)], Sampling())
    assert len(each.score(BASE, [[5] * 127])[0]) == 127


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=1.5), Sampling(temperature=-1.0), Sampling(min_p=2.0), Sampling(top_k=-5), Sampling(max_tokens=0)],
    ids=lambda sampling: str(sampling),
)
def test_sampling_out_of_range_is_refused(each: Engine, sampling: Sampling) -> None:
    with pytest.raises(EngineError, match="refused"):
        generate(each, BASE, [Prompt((5, 6), 1, 1)], sampling)


@pytest.mark.parametrize("token", [100_000, -1])
def test_a_token_outside_the_vocabulary_is_refused(each: Engine, token: int) -> None:
    with pytest.raises(EngineError, match="refused"):
        each.score(BASE, [[5, 6, 7], [5, 6, token]])
    with pytest.raises(EngineError, match="refused"):
        generate(each, BASE, [Prompt((5, 6, token), 1, 1)], Sampling())
    assert len(each.score(BASE, [[5, 6]])[0]) == 2


@pytest.mark.parametrize(
    ("kind", "has_folder"), [("full", True), ("full", False), ("lora", False), ("base", True), ("stream", False)]
)
def test_no_other_kind_passes_for_one_that_it_takes(each: Engine, tmp_path: Path, kind: str, has_folder: bool) -> None:
    policy = Policy("run", 1, "sha256:1", kind, tmp_path if has_folder else None)
    refusal = "is not readable" if kind in each.kinds and kind == "full" and has_folder else f"is of kind {kind}"
    with pytest.raises(EngineError, match=refusal):
        each.load(policy)
    with pytest.raises(EngineError, match=f"is of kind {kind}|is not loaded"):
        each.score(policy, [[5, 6]])


def test_an_engine_that_gave_its_memory_away_does_nothing_until_it_has_it_back(
    each: Engine, policies: NewPolicy
) -> None:
    one, two = policies(1), policies(2)
    digest = each.load(one).digest
    before = generate(each, one, [Prompt(PROMPT, 1, 2)], Sampling())
    each.resume()  # it has it
    each.release()
    each.release()
    uses: list[Callable[[], object]] = [
        lambda: each.load(two),
        lambda: generate(each, one, [Prompt(PROMPT, 1, 2)], Sampling()),
        lambda: each.score(BASE, sequences(1)),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="resume it first"):
            use()
    each.resume()
    each.resume()
    assert generate(each, one, [Prompt(PROMPT, 1, 2)], Sampling()) == before
    assert each.load(one).digest == digest
    each.load(two)
    assert each.score(two, sequences(1)) != each.score(one, sequences(1))
