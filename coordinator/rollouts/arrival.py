"""Arrival: a batch of rollouts is checked item by item, judged by the gates, and stored."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.errors import Refusal
from coordinator.operations.access import Caller
from coordinator.rollouts import groups, queries
from coordinator.rollouts.retention import await_tombstones
from coordinator.rollouts.rewards import store_rewards
from coordinator.rules.identity import (
    Fault,
    canonical_log_probs,
    check_evidence,
    check_rows,
    check_spans,
    content_digest,
)
from coordinator.runs.service import Run, contract_numbers, counts
from coordinator.wire.base import LARGEST_BATCH
from coordinator.wire.columns import (
    RolloutColumns,
    decode_rollouts,
    ragged,
    rollout_columns,
    validation_fault,
)
from coordinator.wire.rollouts import (
    ArrivalAnswer,
    ArrivalVerdict,
    GenerationFailure,
    Reward,
    Rollout,
    RolloutBatch,
    RolloutIdentity,
)

log = logging.getLogger("coordinator.arrival")

LARGEST_BATCH_TOKENS = 8 * 2**20


@dataclass(frozen=True)
class Item:
    """One rollout that is whole and fits its run, ready to be judged and stored."""

    place: int
    identity: RolloutIdentity
    content_hash: bytes
    token_ids: bytes
    action_mask: bytes
    behavior_log_probs: bytes
    side_data: bytes | None
    action_tokens: int
    span_acts: tuple[bool, ...]
    flags: str


@dataclass(frozen=True)
class Arrived:
    """A batch before it is stored: what may be, and what is at fault, by its place in the batch."""

    columns: RolloutColumns
    items: list[Item]
    faults: dict[int, Fault]


def decode_json(body: bytes) -> RolloutColumns:
    """The columns of a JSON body. An item of the wrong shape becomes a Fault; a wrong body refuses the call."""
    try:
        return rollout_columns(RolloutBatch.model_validate_json(body).rollouts)
    except ValidationError as whole:
        try:
            # Not json.loads: it lets half a surrogate pair through, which can be neither stored nor answered.
            read = from_json(body)
        except ValueError:
            read = None
        # A field beside `rollouts` is a fault of the whole call.
        items = read["rollouts"] if isinstance(read, dict) and read.keys() == {"rollouts"} else None
        if isinstance(items, list) and len(items) > LARGEST_BATCH:
            raise Refusal("too_large", f"a batch holds at most {LARGEST_BATCH} rollouts, not {len(items)}") from whole
        if not isinstance(items, list) or not items:
            fault = validation_fault(whole, "body")
            raise Refusal("invalid_request", fault.detail, field=fault.field) from whole
    rollouts: list[Rollout] = []
    faults: dict[int, tuple[Fault, str | None]] = {}
    for place, item in enumerate(items):
        try:
            rollouts.append(Rollout.model_validate(item))
        except ValidationError as error:
            named = item.get("rollout_id") if isinstance(item, dict) else None
            faults[place] = (validation_fault(error), named if isinstance(named, str) else None)
    good = rollout_columns(rollouts)
    rows = iter(range(len(good)))
    order = [None if place in faults else next(rows) for place in range(len(items))]
    empty = np.empty(0)
    return RolloutColumns(
        [faults[p][0] if row is None else good.identities[row] for p, row in enumerate(order)],
        [faults[p][1] if row is None else good.ids[row] for p, row in enumerate(order)],
        ragged([empty if row is None else good.token_ids[row] for row in order], np.int64),
        ragged([empty if row is None else good.action_mask[row] for row in order], np.bool_),
        ragged([empty if row is None else good.behavior_log_probs[row] for row in order], np.float32),
        [None if row is None else good.side_data[row] for row in order],
    )


def decode_arrow(body: bytes) -> RolloutColumns:
    """The columns of an Arrow stream."""
    columns = decode_rollouts(body)
    if not len(columns):
        raise Refusal("invalid_request", "a batch holds at least one rollout")
    return columns


def arrive(decode: Callable[[bytes], RolloutColumns], body: bytes, run: Run, caller: Caller) -> Arrived:
    """A body, decoded and examined. Blocks: run it in a thread."""
    return examine(decode(body), run, caller)


def examine(columns: RolloutColumns, run: Run, caller: Caller) -> Arrived:
    """Sorts a batch into items that may be stored and faults."""
    tokens = max(len(c.values) for c in (columns.token_ids, columns.action_mask, columns.behavior_log_probs))
    if tokens > LARGEST_BATCH_TOKENS:
        raise Refusal("too_large", f"a batch holds at most {LARGEST_BATCH_TOKENS} tokens, not {tokens}")
    faults: dict[int, Fault] = {}
    whole: list[int] = []
    lengths = [np.diff(c.offsets) for c in (columns.token_ids, columns.action_mask, columns.behavior_log_probs)]
    differ = ((lengths[0] != lengths[1]) | (lengths[0] != lengths[2])).tolist()
    same_contract: dict[int, bool] = {}
    for place, identity in enumerate(columns.identities):
        fault = identity if isinstance(identity, Fault) else _outside_run(identity, run, caller, same_contract)
        if fault is None and differ[place]:
            fault = Fault(
                "lengths_differ",
                "token_ids",
                f"token_ids has {lengths[0][place]} entries, action_mask "
                f"{lengths[1][place]}, behavior_log_probs {lengths[2][place]}",
            )
        if fault is None and not isinstance(identity, Fault):
            fault = _side_data_fault(identity, columns.side_data[place])
        if fault is None:
            whole.append(place)
        else:
            faults[place] = fault

    every = len(whole) == len(columns)
    token_ids = columns.token_ids if every else columns.token_ids.take(whole)
    mask = columns.action_mask if every else columns.action_mask.take(whole)
    log_probs = columns.behavior_log_probs if every else columns.behavior_log_probs.take(whole)
    evidence_faults, facts = check_evidence(
        token_ids.values, mask.values, log_probs.values, token_ids.offsets, run.vocab_size
    )
    first_action, last_action = facts.first_action.tolist(), facts.last_action.tolist()
    action_tokens, zero_tail = facts.action_tokens.tolist(), facts.zero_tail.tolist()
    bounds = token_ids.offsets.tolist()
    stored = [
        values.tobytes()
        for values in (token_ids.values.astype("<i4"), mask.values, log_probs.values.astype("<f4", copy=False))
    ]
    canonical = memoryview(canonical_log_probs(log_probs.values, mask.values).tobytes())
    nested: dict[int, str] = {}
    items: list[Item] = []
    for row, place in enumerate(whole):
        identity = columns.identities[place]
        assert not isinstance(identity, Fault)
        spans = identity.spans
        start, end = bounds[row], bounds[row + 1]
        found = evidence_faults.get(row)
        if found is None and not (
            len(spans) == 1
            and spans[0].start <= first_action[row]
            and last_action[row] < spans[0].end <= end - start
            and identity.row_starts == (0,)
        ):
            found = check_spans(
                [s.start for s in spans], [s.end for s in spans], mask[row], first_action[row], last_action[row]
            ) or check_rows(identity.row_starts, mask[row])
        if found is not None:
            faults[place] = found
            continue
        ids, marks, probs = stored[0][4 * start : 4 * end], stored[1][start:end], stored[2][4 * start : 4 * end]
        items.append(
            Item(
                place,
                identity,
                content_digest(identity.hashed_json(nested), ids, marks, canonical[4 * start : 4 * end]),
                ids,
                marks,
                probs,
                columns.side_data[place],
                action_tokens[row],
                (True,) if len(spans) == 1 else tuple(bool(mask[row][s.start : s.end].any()) for s in spans),
                "zero_tail" if zero_tail[row] else "",
            )
        )
    return Arrived(columns, items, faults)


def _side_data_fault(identity: RolloutIdentity, side_data: bytes | None) -> Fault | None:
    """Why the blob is not the one that its digest names."""
    if (side_data is None) != (identity.side_data_digest is None):
        return Fault("side_data_mismatch", "side_data", "side_data and side_data_digest come together, or neither does")
    if side_data is None or hashlib.sha256(side_data).hexdigest() == identity.side_data_digest:
        return None
    return Fault("side_data_mismatch", "side_data_digest", "side_data_digest is not the sha256 of side_data")


def _outside_run(identity: RolloutIdentity, run: Run, caller: Caller, same_contract: dict[int, bool]) -> Fault | None:
    """Why an identity, whole in itself, does not belong into this run.

    `same_contract` remembers by `id()` which contracts of the batch are the run's.
    """
    if (fault := member_fault(identity, run, caller)) is not None:
        return fault
    if identity.reward is not None and not run.settings.reward_on_arrival:
        return Fault("reward_not_allowed", "reward", "the run takes rewards from the reward service only")
    if id(identity.contract) not in same_contract:
        same_contract[id(identity.contract)] = identity.contract == run.contract
    if not same_contract[id(identity.contract)] and run.settings.other_contract == "reject":
        ours, theirs = run.contract.model_dump(), identity.contract.model_dump()
        field = next(name for name in ours if ours[name] != theirs[name])
        return Fault(
            "contract_mismatch",
            f"contract.{field}",
            f"contract.{field} is {theirs[field]}, the run's is {ours[field]}",
        )
    return None


def member_fault(identity: RolloutIdentity | GenerationFailure, run: Run, caller: Caller) -> Fault | None:
    """Why a sender may not speak for this member of a group."""
    if caller.role == "worker" and caller.worker_id != identity.worker_id:
        return Fault("wrong_worker", "worker_id", f"the token is bound to worker {caller.worker_id}")
    size = run.settings.group_size
    if size is not None and identity.sample_index >= size:
        return Fault(
            "sample_index_out_of_range",
            "sample_index",
            f"sample_index {identity.sample_index} of a group of {size}",
        )
    if identity.attempt >= run.settings.max_attempts:
        return Fault(
            "attempt_out_of_range",
            "attempt",
            f"attempt {identity.attempt}, but a member has {run.settings.max_attempts}, counted from 0",
        )
    return None


async def take_in(connection: AsyncConnection, run: Run, arrived: Arrived, caller: Caller) -> ArrivalAnswer:
    """Stores what may be stored and answers one verdict for each item, in the order sent.

    `run` was read before the transaction: nothing of it that changes is used, the pointer is read where it counts.
    """
    columns, items, faults = arrived.columns, arrived.items, arrived.faults
    await _require_room(connection, run, items)
    verdicts: dict[int, ArrivalVerdict] = {}
    numbers: dict[int, int] = {}
    claimed = sorted({getattr(item.identity, run.group_column) for item in items})
    if items:
        numbers = await _contract_numbers(connection, run, items)
        items, mismatched = await _claim_groups(connection, run, items, numbers)
        faults = faults | mismatched
    verdicts |= await _refuse(connection, run, faults, columns, caller)
    fallen: dict[str, int] = {}
    repeated: list[tuple[Item, Item]] = []
    while items:
        first, repeats = _first_of_each(items)
        stored, fell = await _store(connection, run, first, numbers, caller)
        verdicts |= stored
        fallen |= fell
        rewarded, fell = await _store_rewards(connection, run, first, verdicts, caller)
        verdicts |= rewarded
        fallen |= fell
        # Only what is here stands in the way of a repeat: where the first of them conflicts, the next may be taken in.
        repeated += [(item, other) for item, other in repeats if verdicts[other.place].verdict != "conflict"]
        items = [item for item, other in repeats if verdicts[other.place].verdict == "conflict"]
    for place, verdict in verdicts.items():  # a member may take its siblings along
        if verdict.verdict in ("accepted", "duplicate") and verdict.rollout_id in fallen:
            fell_with = {"state": "offline", "revision": fallen[verdict.rollout_id], "reason": "group_refused"}
            verdicts[place] = verdict.model_copy(update=fell_with)
    for item, other in repeated:
        same = item.content_hash == other.content_hash and (item.identity.rollout_id == other.identity.rollout_id)
        before = verdicts[other.place]
        verdicts[item.place] = ArrivalVerdict(
            rollout_id=item.identity.rollout_id,
            verdict="duplicate" if same else "conflict",
            state=before.state if same else None,
            revision=before.revision if same else None,
        )
    if any(verdict.verdict == "conflict" for verdict in verdicts.values()):
        await connection.execute(
            queries.for_run(queries.DROP_EMPTY_GROUPS, run.group_column), {"run_no": run.run_no, "group_ids": claimed}
        )
    return ArrivalAnswer(verdicts=[verdicts[place] for place in range(len(columns))])


async def _require_room(connection: AsyncConnection, run: Run, items: list[Item]) -> None:
    limit = run.settings.storage_limit_bytes
    if limit is None:
        return
    sizes = {i.identity.rollout_id: _size(i) for i in items}
    stored = (await counts(connection, run)).get("evidence_bytes", 0)
    if stored + sum(sizes.values()) > limit:
        # What is here already takes no room: who sends again is not held back by what he had sent.
        known = await connection.execute(queries.FIND_KNOWN, {"run_no": run.run_no, "rollout_ids": list(sizes)})
        coming = sum(sizes.values()) - sum(sizes[row.rollout_id] for row in known)
        if coming and stored + coming > limit:
            raise Refusal(
                "storage_full", f"run {run.run_id} stores {stored} of {limit} bytes; {coming} more do not fit"
            )


def _size(item: Item) -> int:
    """Bytes of evidence that the item stores."""
    return len(item.token_ids) + len(item.action_mask) + len(item.behavior_log_probs) + len(item.side_data or b"")


async def _contract_numbers(connection: AsyncConnection, run: Run, items: list[Item]) -> dict[int, int]:
    """The numbers of the contracts by their `id()`: nearly always all items share one, which is compared once."""
    different = {id(item.identity.contract): item.identity.contract for item in items}
    numbers = await contract_numbers(connection, run, different.values())
    return {key: numbers[contract] for key, contract in different.items()}


async def _claim_groups(
    connection: AsyncConnection, run: Run, items: list[Item], numbers: dict[int, int]
) -> tuple[list[Item], dict[int, Fault]]:
    """Makes and locks the groups. Answers the items that share their group's contract, and the others' faults."""
    versions = sorted({span.version for item in items for span in item.identity.spans})
    await connection.execute(queries.SHARE_CANDIDATES, {"run_no": run.run_no, "versions": versions})
    wanted: dict[str, int | None] = {}
    for item in items:
        wanted.setdefault(getattr(item.identity, run.group_column), numbers[id(item.identity.contract)])
    pinned = await groups.claim(connection, run, wanted)
    faults = {
        item.place: Fault(
            "contract_mismatch",
            "contract",
            f"group {item.identity.group_id} was generated under another contract",
        )
        for item in items
        if pinned[getattr(item.identity, run.group_column)] != numbers[id(item.identity.contract)]
    }
    return [item for item in items if item.place not in faults], faults


async def _refuse(
    connection: AsyncConnection, run: Run, faults: dict[int, Fault], columns: RolloutColumns, caller: Caller
) -> dict[int, ArrivalVerdict]:
    """The verdicts of items at fault, which are counted by worker and reason and leave nothing else."""
    senders = {}
    for place, fault in faults.items():
        identity = columns.identities[place]
        senders[place] = caller.worker_id or (caller.actor if isinstance(identity, Fault) else identity.worker_id)
        log.info("run %s: rejected %s from %s: %s", run.run_id, columns.ids[place], senders[place], fault.detail)
    await count_rejections(connection, run, [(senders[place], fault) for place, fault in faults.items()])
    return {
        place: ArrivalVerdict(rollout_id=columns.ids[place], verdict="rejected", reason=fault.code, detail=fault.detail)
        for place, fault in faults.items()
    }


async def count_rejections(connection: AsyncConnection, run: Run, rejected: Iterable[tuple[str, Fault]]) -> None:
    """Counts what was rejected, by its sender and the reason; a worker with many becomes suspect."""
    found: Counter[tuple[str, str]] = Counter()
    details: dict[tuple[str, str], str] = {}
    for sender, fault in rejected:
        found[sender, fault.code] += 1
        details[sender, fault.code] = fault.detail[:300]
    if not found:
        return
    keys = sorted(found)
    await connection.execute(
        queries.COUNT_REJECTIONS,
        {
            "run_no": run.run_no,
            "worker_ids": [sender for sender, _ in keys],
            "reasons": [reason for _, reason in keys],
            "ns": [found[key] for key in keys],
            "details": [details[key] for key in keys],
        },
    )


async def _store_rewards(
    connection: AsyncConnection, run: Run, items: list[Item], verdicts: dict[int, ArrivalVerdict], caller: Caller
) -> tuple[dict[int, ArrivalVerdict], dict[str, int]]:
    """Stores the rewards that came with rollouts that are here, now or from an earlier sending.

    Answers the verdicts of these, and the rollouts that fell with their groups: id -> revision.
    """
    rewarded = [
        (item.place, Reward(rollout_id=item.identity.rollout_id, **item.identity.reward.model_dump()))
        for item in items
        if item.identity.reward is not None and verdicts[item.place].verdict != "conflict"
    ]
    if not rewarded:
        return {}, {}
    answers, fallen = await store_rewards(connection, run, [reward for _, reward in rewarded], caller)
    after = {
        place: verdicts[place].model_copy(
            update={
                "reward": answer.verdict,
                "state": answer.state or verdicts[place].state,
                "revision": verdicts[place].revision if answer.revision is None else answer.revision,
            }
        )
        for (place, _), answer in zip(rewarded, answers, strict=True)
    }
    return after, fallen


def own_group(run: Run, member: RolloutIdentity | GenerationFailure) -> str | None:
    """Says that a rollout is a group of its own where it named another: the run has no group size. None: it is not."""
    if run.settings.group_size is not None or member.group_id == member.rollout_id:
        return None
    return f"the run has no group_size: this rollout is a group of its own, not a member of {member.group_id}"


def _first_of_each(items: Iterable[Item]) -> tuple[list[Item], list[tuple[Item, Item]]]:
    """Within one batch the first of a rollout_id, or of a (group, sample, attempt), wins over later ones."""
    first: list[Item] = []
    repeats: list[tuple[Item, Item]] = []
    seen: dict[Any, Item] = {}
    for item in items:
        i = item.identity
        keys = (i.rollout_id, (i.group_id, i.sample_index, i.attempt))
        earlier = next((seen[key] for key in keys if key in seen), None)
        if earlier is not None:
            repeats.append((item, earlier))
            continue
        seen.update(dict.fromkeys(keys, item))
        first.append(item)
    return first, repeats


async def _store(
    connection: AsyncConnection, run: Run, items: list[Item], numbers: dict[int, int], caller: Caller
) -> tuple[dict[int, ArrivalVerdict], dict[str, int]]:
    """The verdicts, and the rollouts that fell with groups that these arrivals made hopeless: id -> revision."""
    group_ids = sorted({getattr(item.identity, run.group_column) for item in items})
    spans = [
        (n, span, acts)
        for n, item in enumerate(items, start=1)
        for span, acts in zip(item.identity.spans, item.span_acts, strict=True)
    ]
    await await_tombstones(connection, run, [item.identity for item in items])
    rows = await connection.execute(
        queries.for_run(queries.ARRIVE, run.group_column),
        {
            "run_no": run.run_no,
            "actor": caller.actor,
            "gate_lag": run.settings.lag_gate == "enforce",
            "max_lag": run.settings.max_lag,
            "stale_to": run.settings.stale_to,
            **{
                name: [getattr(item.identity, name) for item in items]
                for name in (
                    "rollout_id", "task_id", "task_source", "group_id", "sample_index", "attempt", "worker_id",
                    "incarnation", "span_source",
                )
            },
            "generation": [item.identity.generation.model_dump_json(exclude_none=True) for item in items],
            **{
                name: [getattr(item, name) for item in items]
                for name in (
                    "flags", "action_tokens", "content_hash", "token_ids", "action_mask", "behavior_log_probs",
                    "side_data",
                )
            },
            "side_data_digest": [item.identity.side_data_digest for item in items],
            "row_starts": [
                None if item.identity.row_starts == (0,) else ",".join(map(str, item.identity.row_starts))
                for item in items
            ],
            "contract_no": [numbers[id(item.identity.contract)] for item in items],
            "span_item": [n for n, _, _ in spans],
            "span_version": [span.version for _, span, _ in spans],
            "span_hash": [span.artifact_hash for _, span, _ in spans],
            "span_start": [span.start for _, span, _ in spans],
            "span_end": [span.end for _, span, _ in spans],
            "span_acts": [acts for _, _, acts in spans],
        },
    )  # fmt: skip
    placed = {row.rollout_id: row for row in rows}
    left_out = [item for item in items if item.identity.rollout_id not in placed]
    found = {}
    if left_out:
        rows = await connection.execute(
            queries.FIND_KNOWN,
            {"run_no": run.run_no, "rollout_ids": [item.identity.rollout_id for item in left_out]},
        )
        found = {row.rollout_id: row for row in rows}
    fallen = await groups.refresh(connection, run, group_ids, caller.actor) if placed else {}
    verdicts: dict[int, ArrivalVerdict] = {}
    for item in items:
        rollout_id = item.identity.rollout_id
        new = rollout_id in placed
        row = placed.get(rollout_id) or found.get(rollout_id)
        if row is None or not (new or row.content_hash == item.content_hash):
            detail = (
                "another rollout has this group_id, sample_index and attempt"
                if row is None
                else "this rollout_id is taken by other content"
            )
            verdicts[item.place] = ArrivalVerdict(rollout_id=rollout_id, verdict="conflict", detail=detail)
            continue
        verdicts[item.place] = ArrivalVerdict(
            rollout_id=rollout_id,
            verdict="accepted" if new else "duplicate",
            state=row.state,
            revision=row.revision,
            reason=row.reason,
            detail=own_group(run, item.identity),
        )
    return verdicts, fallen
