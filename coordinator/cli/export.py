"""rollouts export: Parquet, written while it is read, so that memory does not grow with the run."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coordinator.cli.faults import USAGE, Failure
from coordinator.cli.output import say
from coordinator.client import Run
from coordinator.wire.columns import EvidenceColumns
from coordinator.wire.rollouts import RolloutView, State

SCHEMA_VERSION = 1
_CHUNK_ROLLOUTS, _CHUNK_TOKENS = 100, 1_000_000
"""What one call for evidence asks for at most, a rollout that is longer by itself."""
_ROW_GROUP_BYTES = 32 * 2**20
_FIRST_SECONDS, _EVERY_SECONDS = 2.0, 10.0


def _field(name: str, kind: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable, {"description": description})


_SPAN = pa.struct(
    [
        pa.field("version", pa.int32(), nullable=False),
        pa.field("artifact_hash", pa.string(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
_DROPPED = "null: it has none, or retention has dropped them"

SCHEMA = pa.schema(
    [
        _field("rollout_id", pa.string(), "unique in the run; rows are in its order"),
        _field("group_id", pa.string(), "the rollouts of one prompt"),
        _field("task_id", pa.string(), "the task, as whoever generated names it"),
        _field("task_source", pa.string(), "where the task comes from"),
        _field("sample_index", pa.int32(), "its place in the group, from 0"),
        _field("attempt", pa.int32(), "at this sample, from 0"),
        _field("state", pa.string(), "where it stood when it was read"),
        _field("revision", pa.int32(), "changes of its state before that, its arrival not counted"),
        _field("reason", pa.string(), "why it is quarantined or offline", nullable=True),
        _field("update_id", pa.string(), "the update that holds or consumed it", nullable=True),
        _field("worker_id", pa.string(), "who generated it"),
        _field("incarnation", pa.string(), "the life of the worker that did"),
        _field("spans", pa.list_(_SPAN), "tokens [start, end) came from this policy version"),
        _field("span_source", pa.string(), "engine, segmented or dispatch: who knows the spans"),
        _field("contract_hash", pa.string(), "of the generation contract; null: the generation failed", nullable=True),
        _field("generation", pa.string(), "JSON: seed, max_tokens, stop, finish_reason, engine, engine_version"),
        _field("tokens", pa.int32(), "how many tokens it has, prompt and response"),
        _field("action_tokens", pa.int32(), "how many of them the policy chose"),
        _field("row_starts", pa.list_(pa.int32()), "where each training row begins, usually at 0 alone"),
        _field("token_ids", pa.list_(pa.int32()), f"[tokens], prompt and response; {_DROPPED}", nullable=True),
        _field("action_mask", pa.list_(pa.bool_()), f"[tokens], what the policy chose; {_DROPPED}", nullable=True),
        _field(
            "behavior_log_probs",
            pa.list_(pa.float32()),
            f"[tokens], [i] scores token_ids[i] given all before it; NaN where a masked token has none; {_DROPPED}",
            nullable=True,
        ),
        _field("side_data", pa.binary(), f"the opaque blob that came with it; {_DROPPED}", nullable=True),
        _field("side_data_digest", pa.string(), "the sha256 of side_data; null: none came with it", nullable=True),
        _field("reward", pa.float64(), "null: none yet, or it failed; never 0.0 in its place", nullable=True),
        _field("reward_status", pa.string(), "ok, timeout or error; null: none yet", nullable=True),
        _field("ruleset_id", pa.string(), "the rules of the reward", nullable=True),
        _field("content_hash", pa.string(), "the sha256 over all that it carried when it arrived"),
        _field("flags", pa.list_(pa.string()), "what was noticed about it at its arrival"),
        _field("arrived_at", pa.timestamp("us", "UTC"), "by the database's clock"),
    ]
)
"""The columns of an export."""


def export(
    run: Run, file: Path, *, state: State | None, group_id: str | None, version: int | None, overwrite: bool
) -> int:
    """Write the rollouts that meet every filter to `file`, which appears whole or not at all. Answers how many."""
    if file.is_dir():
        raise Failure(f"{file} is a folder", "Name a file in it.", USAGE)
    if file.exists() and not overwrite:
        raise Failure(f"{file} is there already", "Name another file, or say --overwrite.", USAGE)
    filters = {"state": state, "group_id": group_id, "version": version}
    given = {name: value for name, value in filters.items() if value is not None}
    total = _total(run, state) if not given or list(given) == ["state"] else None
    schema = SCHEMA.with_metadata(
        {
            "coordinator.schema_version": str(SCHEMA_VERSION),
            "coordinator.run_id": run.id,
            "coordinator.filters": json.dumps(given),
            "coordinator.exported_at": datetime.now(UTC).isoformat(),
        }
    )
    # Of this export alone: one that was begun twice must not mix its rows with the other's.
    partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            rollouts = run.rollouts(state, group_id, version=version)
            done = _write(writer, run, rollouts, total)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return done


def _total(run: Run, state: State | None) -> int:
    counts = run.counts().rollouts
    return sum(counts.values()) if state is None else counts[state]


def _write(writer: pq.ParquetWriter, run: Run, rollouts: Iterable[RolloutView], total: int | None) -> int:
    done, tell_at = 0, time.monotonic() + _FIRST_SECONDS
    waiting: list[pa.Table] = []
    for chunk in _chunks(rollouts):
        waiting.append(_table(chunk, run.evidence_of([view.rollout_id for view in chunk])))
        done += len(chunk)
        # Many short rollouts are one row group, since a reader opens each by itself.
        if sum(table.nbytes for table in waiting) >= _ROW_GROUP_BYTES:
            writer.write_table(pa.concat_tables(waiting))
            waiting.clear()
        if time.monotonic() >= tell_at:
            say(f"{done}{'' if total is None else f' of {total}'} rollouts so far")
            tell_at = time.monotonic() + _EVERY_SECONDS
    if waiting:
        writer.write_table(pa.concat_tables(waiting))
    return done


def _chunks(rollouts: Iterable[RolloutView]) -> Iterator[list[RolloutView]]:
    chunk: list[RolloutView] = []
    tokens = 0
    for view in rollouts:
        if chunk and (len(chunk) == _CHUNK_ROLLOUTS or tokens + view.tokens > _CHUNK_TOKENS):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(view)
        tokens += view.tokens
    if chunk:
        yield chunk


def _table(views: list[RolloutView], evidence: EvidenceColumns) -> pa.Table:
    """Rollouts with their evidence, where there is any."""
    place = {rollout_id: i for i, rollout_id in enumerate(evidence.rollout_id)}
    at = [place.get(view.rollout_id) for view in views]

    def lists(values: Any, dtype: type[np.generic]) -> list[Any]:
        return [None if i is None else values[i].astype(dtype) for i in at]

    columns: dict[str, Any] = {
        "token_ids": lists(evidence.token_ids, np.int32),
        "action_mask": lists(evidence.action_mask, np.bool_),
        "behavior_log_probs": lists(evidence.behavior_log_probs, np.float32),
        "side_data": [None if i is None else evidence.side_data[i] for i in at],
        "spans": [[span.model_dump() for span in view.spans] for view in views],
        "generation": [view.generation.model_dump_json(exclude_none=True) for view in views],
    }
    arrays = [
        pa.array(columns.get(field.name) or [getattr(view, field.name) for view in views], field.type)
        for field in SCHEMA
    ]
    return pa.table(arrays, schema=SCHEMA)
