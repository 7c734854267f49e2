"""The canonical JSON that arrivals are hashed over is put together by hand: it is what the definition gives."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.identity import canonical_json
from coordinator.wire.rollouts import Generation, RolloutIdentity, Span
from coordinator.wire.runs import GenerationContract

identifier = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,199}", fullmatch=True)
name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", fullmatch=True)
sha256 = st.binary(max_size=4).map(lambda data: hashlib.sha256(data).hexdigest())
index = st.integers(0, 2**31 - 1)
no_nul = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
label = st.none() | st.text(no_nul, max_size=20)
contract = st.builds(
    GenerationContract,
    tokenizer_hash=sha256,
    chat_template_hash=sha256,
    temperature=st.floats(0, allow_nan=False, allow_infinity=False),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=index,
    min_p=st.floats(0, 1),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float8"]),
)
generation = st.builds(
    Generation,
    seed=st.none() | st.integers(),
    max_tokens=st.none() | st.integers(),
    stop=st.none() | st.lists(st.text(no_nul, max_size=10), max_size=3).map(tuple),
    finish_reason=label,
    engine=label,
    engine_version=label,
)
identity = st.builds(
    RolloutIdentity,
    rollout_id=identifier,
    task_id=identifier,
    task_source=identifier,
    group_id=identifier,
    sample_index=index,
    attempt=index,
    spans=st.lists(
        st.builds(Span, version=index, artifact_hash=sha256, start=index, end=index), min_size=1, max_size=3
    ).map(tuple),
    span_source=st.sampled_from(["engine", "segmented", "dispatch"]),
    worker_id=name,
    incarnation=identifier,
    contract=contract,
    generation=generation,
    side_data_digest=st.none() | sha256,
    row_starts=st.just((0,)) | st.lists(index, min_size=1, max_size=3).map(tuple),
    reward=st.none(),
)


@given(st.lists(identity, min_size=1, max_size=3))
def test_it_is_the_canonical_json_of_what_takes_part(identities: list[RolloutIdentity]) -> None:
    nested: dict[int, str] = {}
    for one in identities:
        assert one.hashed_json(nested) == canonical_json(one.hashed())


def test_no_field_is_forgotten() -> None:
    """A new field takes part in the hash, or it is the reward; `hashed_json` and the strategy above must know it."""
    assert set(RolloutIdentity.model_fields) == {
        "rollout_id", "task_id", "task_source", "group_id", "sample_index", "attempt", "spans", "span_source",
        "worker_id", "incarnation", "contract", "generation", "side_data_digest", "row_starts", "reward",
    }  # fmt: skip
    assert set(Span.model_fields) == {"version", "artifact_hash", "start", "end"}
