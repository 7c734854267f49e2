"""Requests in flight: begun in pieces, finished as they come, broken off and gone on with."""

from collections.abc import Callable

import pytest

from tests.worker_agent.tiny import BASE
from worker_agent.engines.engine import Completion, Engine, EngineError, Policy, Request, Sampling

NewPolicy = Callable[[int], Policy]
PROMPT = tuple(range(20, 60))


def requests(*names: str, max_tokens: int = 24) -> list[Request]:
    return [Request(name, PROMPT, seed, max_tokens) for seed, name in enumerate(names)]


def all_finished(engine: Engine, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while len(done) < count:
        for request_id, answer in engine.finished(1.0).items():
            assert isinstance(answer, Completion), answer
            done[request_id] = answer
    return done


def broken_off(engine: Engine, policy: Policy, asked: list[Request], sampling: Sampling) -> dict[str, Completion]:
    """What an interruption leaves, one of which at least was under way: a fast engine is interrupted sooner."""
    for seconds in (0.05, 0.02, 0.005, 0.0):
        engine.begin(policy, asked, sampling)
        left: dict[str, Completion] = {}
        for request_id, answer in (engine.finished(seconds) | engine.interrupt()).items():
            assert isinstance(answer, Completion), answer
            left[request_id] = answer
        if any(completion.finish_reason == "abort" for completion in left.values()):
            return left
    raise AssertionError(f"all had ended before they were interrupted: {left}")


def tokens(completions: dict[str, Completion]) -> dict[str, list[int]]:
    return {request_id: completion.token_ids for request_id, completion in completions.items()}


def test_what_joins_later_does_not_change_what_is_in_flight(each: Engine) -> None:
    each.begin(BASE, requests("a", "b"), Sampling())
    alone = all_finished(each, 2)
    assert each.finished(60.0) == {}  # nothing is in flight: there is nothing to wait for
    each.begin(BASE, requests("a"), Sampling())
    first = each.finished(0.0)
    each.begin(BASE, requests("a", "b")[1:], Sampling())
    together = first | all_finished(each, 2 - len(first))
    assert tokens(together) == tokens(alone)  # type: ignore[arg-type]


def test_what_was_broken_off_has_a_beginning_of_the_whole(each: Engine) -> None:
    greedy = Sampling(temperature=0.0)
    each.begin(BASE, requests("a", "b", "c", max_tokens=80), greedy)
    whole = all_finished(each, 3)
    part = broken_off(each, BASE, requests("a", "b", "c", max_tokens=80), greedy)
    assert part.keys() == whole.keys()
    assert each.finished(60.0) == {} == each.interrupt()
    for name, completion in part.items():
        made = len(completion.token_ids)
        assert completion.token_ids == whole[name].token_ids[:made]
        assert completion.log_probs == pytest.approx(whole[name].log_probs[:made], abs=1e-5)
        assert (completion.finish_reason == "abort") == (made < len(whole[name].token_ids))


def test_it_goes_on_under_another_policy(each: Engine, policies: NewPolicy) -> None:
    """And computes what is before the cut anew, under the weights that it goes on with."""
    one, two = policies(1), policies(2)
    each.load(one)
    cut = broken_off(each, one, requests("a", max_tokens=80), Sampling())["a"]
    each.load(two)
    so_far = (*PROMPT, *cut.token_ids)
    each.begin(two, [Request("a", so_far, 7, 8)], Sampling())
    rest = all_finished(each, 1)["a"]
    scored = each.score(two, [[*so_far, *rest.token_ids]])[0][len(so_far) :]
    assert rest.log_probs == pytest.approx(scored, abs=1e-5)


def test_nothing_else_is_done_meanwhile(each: Engine, policies: NewPolicy) -> None:
    policy, next_one = policies(1), policies(2)
    each.load(policy)
    each.begin(policy, requests("a", max_tokens=80), Sampling())
    others: list[Callable[[], object]] = [
        lambda: each.load(next_one),
        lambda: each.score(policy, [[5, 6]]),
        lambda: each.unload(policy),
        each.release,
    ]
    for other in others:
        with pytest.raises(EngineError, match="1 requests are in flight"):
            other()
    each.interrupt()
    each.load(next_one)


def test_a_refused_request_leaves_the_others_alone(each: Engine) -> None:
    each.begin(BASE, requests("a", "b"), Sampling())
    with pytest.raises(EngineError, match="token"):
        bad = [*requests("c"), Request("d", (), 1, 4)]
        each.begin(BASE, bad, Sampling())
    assert all_finished(each, 2).keys() == {"a", "b"}
    each.begin(BASE, requests("a"), Sampling())
    try:
        each.begin(BASE, [Request("e", (5, 10**6), 1, 4)], Sampling())
    except EngineError:
        answers = {}
    else:
        answers = {"e": EngineError}
    while each_answer := each.finished(60.0):
        for name, answer in each_answer.items():
            assert isinstance(answer, answers.pop(name, Completion))
    assert not answers
