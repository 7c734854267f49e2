"""verl itself, on the tiny model: log-probs, one step, the adapter it writes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.worker_agent.tiny import BASE, train
from worker_agent.engines.engine import Prompt, Sampling, generate
from worker_agent.engines.vllm_engine import VllmEngine
from worker_agent.learner.learner import Learner, LearnerError, StepReport, TrainingSequence

pytestmark = pytest.mark.xdist_group("models")

NewLearner = Callable[..., Learner]


def stepped(learner: Learner, batch: list[TrainingSequence]) -> tuple[StepReport, dict[str, torch.Tensor]]:
    """One step, with the adapter's gradients as the optimizer got them (verl clears them after the step)."""
    parameters = {n: p for n, p in learner._worker.engine.module.named_parameters() if p.requires_grad}
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in parameters.items():
            grad = parameter.grad
            gradients[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()

    hook = learner._worker.engine.optimizer.register_step_pre_hook(keep)
    report = learner.policy_gradient_step(batch)
    hook.remove()
    return report, gradients


def ragged_batch(learner: Learner, rows: int) -> list[TrainingSequence]:
    """Rows of unequal length with holes in their masks, made by a policy that is not quite the learner's."""
    draw = np.random.default_rng(1)
    batch = []
    for row in range(rows):
        tokens = draw.integers(3, 400, size=8 + 5 * row).tolist()
        mask = [i > row and (i % 4 != 1) for i in range(len(tokens))]
        (log_probs,) = learner.log_probs([tokens], [mask])
        noise = draw.normal(scale=0.3, size=len(tokens)).astype(np.float32)
        batch.append(TrainingSequence(tokens, mask, log_probs + noise, float(draw.normal())))
    return batch


def test_engine_and_learner_agree_on_the_base_model(engine: VllmEngine, new_learner: NewLearner) -> None:
    prompt = tuple(range(20, 40))
    samples = generate(engine, BASE, [Prompt(prompt, seed=1, samples=5)], Sampling())[0]
    rows = [[*prompt, *c.token_ids] for c in samples]
    masks = [[False] * len(prompt) + [True] * len(c.token_ids) for c in samples]
    for learned, completion in zip(new_learner().log_probs(rows, masks), samples, strict=True):
        assert learned.dtype == np.float32
        assert not learned[: len(prompt)].any()
        assert np.abs(learned[len(prompt) :] - completion.log_probs).max() < 1e-4


def test_log_probs_do_not_depend_on_the_batch(new_learner: NewLearner) -> None:
    one_by_one, four_at_once = new_learner(micro_batch_size=1), new_learner(micro_batch_size=4)
    batch = ragged_batch(one_by_one, rows=5)
    tokens, masks = [row.token_ids for row in batch], [row.action_mask for row in batch]
    for single, padded, mask in zip(
        one_by_one.log_probs(tokens, masks), four_at_once.log_probs(tokens, masks), masks, strict=True
    ):
        assert single.shape == padded.shape == (len(mask),)
        assert np.abs(single - padded).max() < 1e-5
        assert (single[np.asarray(mask)] < 0).all() and not single[~np.asarray(mask)].any()
    assert four_at_once.log_probs([], []) == []


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_filling_rows_carry_no_weight(new_learner: NewLearner, rows: int) -> None:
    """Five rows in micro-batches of four need three rows more; in micro-batches of one, none."""
    exact, filled = new_learner(micro_batch_size=1), new_learner(micro_batch_size=4)
    batch = ragged_batch(exact, rows)
    report, wanted = stepped(exact, batch)
    filled_report, found = stepped(filled, batch)
    assert report.loss == pytest.approx(filled_report.loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(filled_report.grad_norm, rel=1e-5)
    scale = max(float(g.abs().max()) for g in wanted.values())
    assert scale > 1e-3 and len(wanted) == 8
    assert max(float((wanted[name] - found[name]).abs().max()) for name in wanted) < 1e-5 * scale


def test_the_loss_is_clipped_ppo_over_the_action_tokens(new_learner: NewLearner) -> None:
    """Eq. 7 of arXiv 1707.06347, mean over tokens; for A < 0 bounded by 3 |A| (arXiv 1912.09729)."""
    learner = new_learner()
    batch = ragged_batch(learner, rows=3)
    batch[0] = replace(batch[0], old_log_probs=batch[0].old_log_probs - 2.0)  # ratios far above the clip range
    losses = []
    current = learner.log_probs([r.token_ids for r in batch], [r.action_mask for r in batch])
    for row, log_probs in zip(batch, current, strict=True):
        mask, a = np.asarray(row.action_mask), row.advantage
        ratio = np.exp(log_probs[mask] - row.old_log_probs[mask])
        loss = np.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2))
        losses += list(np.minimum(loss, -3 * a) if a < 0 else loss)
    assert {np.sign(row.advantage) for row in batch} == {-1.0, 1.0}
    assert learner.policy_gradient_step(batch).loss == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_what_is_masked_is_not_learned_from(new_learner: NewLearner) -> None:
    first, second = new_learner(), new_learner()
    batch = ragged_batch(first, rows=2)
    rubbish = [
        replace(row, old_log_probs=np.where(row.action_mask, row.old_log_probs, np.nan).astype(np.float32))
        for row in batch
    ]
    report, wanted = stepped(first, batch)
    rubbish_report, found = stepped(second, rubbish)
    assert report.loss == rubbish_report.loss
    assert wanted and all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_step_makes_the_rewarded_tokens_likelier(new_learner: NewLearner) -> None:
    learner = new_learner()
    tokens, mask = [[20, 30, 40, 50, 60]], [[False, False, True, False, True]]
    (before,) = learner.log_probs(tokens, mask)
    report = learner.policy_gradient_step([TrainingSequence(tokens[0], mask[0], before, 1.0)])
    (after,) = learner.log_probs(tokens, mask)
    assert (after > before)[[2, 4]].all()
    # B starts at zero, so A has no gradient in the first step: half of the tensors change.
    assert (report.changed_tensors, report.tensors) == (4, 8)
    assert report.loss == pytest.approx(-1.0) and report.grad_norm > 0 and report.delta_l2 > 0


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_the_supervised_loss_is_the_mean_over_the_masked_tokens(new_learner: NewLearner, micro_batch_size: int) -> None:
    learner = new_learner(micro_batch_size)
    batch = ragged_batch(learner, rows=3)
    tokens, masks = [row.token_ids for row in batch], [row.action_mask for row in batch]
    before = learner.log_probs(tokens, masks)
    report = learner.supervised_step(tokens, masks)
    scored = np.concatenate([row[np.asarray(mask)] for row, mask in zip(before, masks, strict=True)])
    assert report.loss == pytest.approx(float(-scored.mean()), rel=1e-5)
    after = learner.log_probs(tokens, masks)
    assert sum(map(np.sum, after)) > sum(map(np.sum, before))
    assert (report.changed_tensors, report.tensors) == (4, 8)


def test_either_loss_follows_the_other(new_learner: NewLearner) -> None:
    """A step takes its own loss, whatever the step before it took."""
    learner = new_learner()
    batch = ragged_batch(learner, rows=2)
    tokens, masks = [row.token_ids for row in batch], [row.action_mask for row in batch]
    learner.supervised_step(tokens, masks)
    current = learner.log_probs(tokens, masks)
    on_policy = [replace(row, old_log_probs=now, advantage=1.0) for row, now in zip(batch, current, strict=True)]
    assert learner.policy_gradient_step(on_policy).loss == pytest.approx(-1.0)
    with pytest.raises(LearnerError, match="at least one"):
        learner.supervised_step([], [])
    with pytest.raises(LearnerError, match="2 sequences but 1 action masks"):
        learner.supervised_step(tokens, masks[:1])


def test_equal_learners_stay_equal(new_learner: NewLearner, tmp_path: Path) -> None:
    for name, seed in (("a", 42), ("b", 42), ("c", 43)):
        learner = new_learner(seed=seed)
        train(learner, seed=7)
        learner.export_adapter(tmp_path / name, base_model_name="tiny-qwen2")
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a["adapter_model.safetensors"] != c["adapter_model.safetensors"]


def test_the_exported_change_is_what_the_report_says(new_learner: NewLearner, tmp_path: Path) -> None:
    learner = new_learner()
    learner.export_adapter(tmp_path / "before", base_model_name="tiny-qwen2")
    report = learner.policy_gradient_step(ragged_batch(learner, rows=3))
    files = learner.export_adapter(tmp_path / "after", base_model_name="tiny-qwen2")
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("before", "after"))
    assert len(after) == report.tensors
    assert sum(not torch.equal(before[name], after[name]) for name in before) == report.changed_tensors
    change = sum(float((after[name] - before[name]).double().pow(2).sum()) for name in before) ** 0.5
    assert report.delta_l2 == pytest.approx(change)
    config = json.loads(files[0].read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (16, 32, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == "tiny-qwen2"
    assert "/" not in files[0].read_text()
    with pytest.raises(LearnerError, match="exists"):
        learner.export_adapter(tmp_path / "after", base_model_name="tiny-qwen2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]


def test_advantages_are_normalised_within_the_group(new_learner: NewLearner) -> None:
    rewards, groups = [1.0, 0.0, 0.0, 2.0, 0.5, 3.0, 3.0], ["a", "b", "a", "b", "alone", ("c", 1), ("c", 1)]
    found = new_learner().group_advantages(rewards, groups)
    half = 0.5 / (0.5**0.5 + 1e-6)  # two rewards that differ by 1 have a sample deviation of sqrt(0.5)
    one = 1 / (2**0.5 + 1e-6)
    assert found == pytest.approx([half, -one, -half, one, 0.5, 0.0, 0.0], abs=1e-5)


def test_what_cannot_be_trained_on_is_named(new_learner: NewLearner) -> None:
    learner = new_learner()
    good = TrainingSequence([5, 6, 7], [False, True, True], np.array([0, -1, -1], np.float32), 1.0)
    before = learner.log_probs([good.token_ids], [good.action_mask])
    refused = {
        "has no action token": replace(good, action_mask=[False] * 3),
        "first token cannot be an action": replace(good, action_mask=[True] * 3),
        "3 tokens, 2 mask entries, 3 log-probs": replace(good, action_mask=[False, True]),
        "not finite": replace(good, old_log_probs=np.array([0, np.nan, -1], np.float32)),
        "or the advantage is not finite": replace(good, advantage=float("inf")),
    }
    for message, row in refused.items():
        with pytest.raises(LearnerError, match=f"sequence 1.*{message}"):
            learner.policy_gradient_step([good, row])
    with pytest.raises(LearnerError, match="at least one"):
        learner.policy_gradient_step([])
    with pytest.raises(LearnerError, match="reward is not finite"):
        learner.group_advantages([float("nan")], ["a"])
    assert np.array_equal(before[0], learner.log_probs([good.token_ids], [good.action_mask])[0])


def test_verl_imported_before_is_refused(tiny_model: Path) -> None:
    """Without an accelerator verl takes itself to be on Nvidia, and would fail later and less clearly."""
    program = (
        "import sys, pathlib, verl, verl.plugin.platform as p; p.get_platform()\n"
        "from worker_agent.learner.learner import Learner, LearnerError\n"
        "try: Learner(pathlib.Path(sys.argv[1]), group_size=1)\n"
        "except LearnerError as error: print(error)"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "before anything else imports verl" in done.stdout, done.stderr[-2000:]
