"""Rollouts, candidates and reservations as columns: Arrow IPC streams, and the same from JSON models.

A batch's evidence is flat: values of all rollouts one after another, with int64 offsets of shape [n + 1].
Nulls among log-probs are NaN.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from coordinator.rules.identity import Fault
from coordinator.wire.arrow_stream import ArrowError as ArrowError
from coordinator.wire.arrow_stream import check_stream
from coordinator.wire.base import LARGEST_BATCH, LARGEST_RESERVATION, WireModel
from coordinator.wire.rollouts import EvidenceAnswer, Generation, Rollout, RolloutEvidence, RolloutIdentity
from coordinator.wire.runs import GenerationContract
from coordinator.wire.updates import (
    CandidateRollout,
    Candidates,
    EmptyReason,
    ReserveItem,
    ReserveRequest,
    ReserveVerdict,
)

ARROW_MEDIA_TYPE = "application/vnd.apache.arrow.stream"

IntArray = npt.NDArray[np.int64]

_SPAN = pa.struct([("version", pa.int32()), ("artifact_hash", pa.utf8()), ("start", pa.int32()), ("end", pa.int32())])
ROLLOUT_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.utf8()),
        ("task_id", pa.utf8()),
        ("task_source", pa.utf8()),
        ("group_id", pa.utf8()),
        ("sample_index", pa.int32()),
        ("attempt", pa.int32()),
        ("spans", pa.list_(_SPAN)),
        ("span_source", pa.utf8()),
        ("worker_id", pa.utf8()),
        ("incarnation", pa.utf8()),
        ("contract", pa.utf8()),
        ("generation", pa.utf8()),
        ("token_ids", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("behavior_log_probs", pa.list_(pa.float32())),
        ("row_starts", pa.list_(pa.int32())),
        ("side_data", pa.binary()),
        ("side_data_digest", pa.utf8()),
        ("reward", pa.utf8()),
    ]
)
"""Arrival. `contract`, `generation` and `reward` are JSON objects, as in the JSON body."""

MAY_BE_LEFT_OUT = frozenset({"row_starts", "side_data", "side_data_digest", "reward"})

CANDIDATE_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.utf8()),
        ("revision", pa.int32()),
        ("group_id", pa.utf8()),
        ("task_id", pa.utf8()),
        ("task_source", pa.utf8()),
        ("sample_index", pa.int32()),
        ("attempt", pa.int32()),
        ("policy_version", pa.int32()),
        ("lag", pa.int32()),
        ("reward", pa.float64()),
        ("token_ids", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("behavior_log_probs", pa.list_(pa.float32())),
        ("row_starts", pa.list_(pa.int32())),
        ("side_data", pa.binary()),
    ]
)
"""Candidates. The schema's metadata holds `groups`, `empty`, `contract_hash` and `reserved` as JSON."""

EVIDENCE_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.utf8()),
        ("token_ids", pa.list_(pa.int32())),
        ("action_mask", pa.list_(pa.bool_())),
        ("behavior_log_probs", pa.list_(pa.float32())),
        ("row_starts", pa.list_(pa.int32())),
        ("side_data", pa.binary()),
        ("side_data_digest", pa.utf8()),
    ]
)
"""The tokens of many rollouts. The schema's metadata holds `missing` as JSON."""

RESERVE_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.utf8()),
        ("revision", pa.int32()),
        ("current_log_probs", pa.list_(pa.float32())),
        ("use", pa.utf8()),
    ]
)
"""Reservation; float64 log-probs are taken too. The metadata's `request` holds the other fields as JSON."""


@dataclass(frozen=True)
class Ragged:
    """One column of lists: flat values [N] and offsets [n + 1]."""

    values: npt.NDArray[Any]
    offsets: IntArray

    def __getitem__(self, i: int) -> npt.NDArray[Any]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: Sequence[int]) -> Ragged:
        """These rows, in this order, as a column of their own."""
        return ragged([self[i] for i in rows], self.values.dtype)


def ragged(rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> Ragged:
    """Lays rows end to end."""
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return Ragged(np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype), offsets)


@dataclass(frozen=True)
class RolloutColumns:
    """A batch of rollouts. `identities[i]` is a Fault where the item had no readable identity.

    token_ids int64 (so that one out of range can be told), action_mask bool, behavior_log_probs float32.
    """

    identities: list[RolloutIdentity | Fault]
    ids: list[str | None]
    token_ids: Ragged
    action_mask: Ragged
    behavior_log_probs: Ragged
    side_data: list[bytes | None]

    def __len__(self) -> int:
        return len(self.identities)


def _read_table(
    data: bytes,
    schema: pa.Schema,
    most_rows: int,
    wide: frozenset[str] = frozenset(),
    optional: frozenset[str] = frozenset(),
    pass_over: bool = False,
) -> pa.Table:
    """The stream as one table with exactly the schema's columns, but for `optional` ones that were left out.

    Columns in `wide` may be of float64. Others than the schema's are refused, or with `pass_over`, for an answer that
    a newer server gives, not read.
    """
    check_stream(data, most_rows)
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            table = reader.read_all()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise ArrowError(f"not a readable Arrow IPC stream: {str(error)[:200]}") from error
    names = table.column_names
    if len(set(names)) != len(names):
        raise ArrowError("a column appears twice")
    unknown = [] if pass_over else sorted(set(names) - set(schema.names))
    missing = [name for name in schema.names if name not in names and name not in optional]
    if unknown or missing:
        raise ArrowError(f"missing columns: {missing or 'none'}; unknown columns: {unknown or 'none'}")
    columns = []
    kept = [field for field in schema if field.name in names]
    for field in kept:
        column = table.column(field.name)
        if not _fits(column.type, field.type):
            raise ArrowError(f"column {field.name} is {column.type}, not {field.type}")
        if column.type != field.type and not (field.name in wide and _is_float_list(column.type)):
            try:
                if pa.types.is_dictionary(column.type):
                    column = _plain(field.name, column, len(data))
                column = column.cast(field.type)
            except pa.ArrowException as error:
                raise ArrowError(f"column {field.name} is {column.type}, not {field.type}") from error
        columns.append(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
    return pa.table(columns, names=[field.name for field in kept]).replace_schema_metadata(table.schema.metadata)


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values are of one kind, so that a cast changes their width and nothing else. It may still fail."""
    kind = pa.types
    if kind.is_list(wanted):
        # List views are none of these: pyarrow 26 casts [[1, 2, 3], [4, 5]] from a list view to [[1, 2, 3], []].
        lists = kind.is_list(found) or kind.is_large_list(found) or kind.is_fixed_size_list(found)
        return kind.is_null(found) or bool(
            lists and not kind.is_null(found.value_type) and _fits(found.value_type, wanted.value_type)
        )
    if kind.is_struct(wanted):
        return bool(
            kind.is_struct(found)
            and [f.name for f in found] == [f.name for f in wanted]
            and all(not kind.is_null(f.type) and _fits(f.type, w.type) for f, w in zip(found, wanted, strict=True))
        )
    if kind.is_null(found):  # a column of nothing else
        return True
    if kind.is_string(wanted):
        text = found.value_type if kind.is_dictionary(found) else found
        return bool(kind.is_string(text) or kind.is_large_string(text))
    if kind.is_integer(wanted):
        return bool(kind.is_integer(found))
    if kind.is_floating(wanted):
        return bool(kind.is_floating(found) or kind.is_integer(found))
    return bool(found == wanted)


def _plain(name: str, column: pa.ChunkedArray, size: int) -> pa.ChunkedArray:
    """A dictionary column's texts, unless they are much more than the stream's bytes: one text may count many times."""
    lengths = (pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in column.chunks)
    if sum(lengths) > size + 1024 * len(column):
        raise ArrowError(f"column {name} has a dictionary whose texts are too long for their number")
    return column.cast(column.type.value_type)


def _is_float_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type))


def _ragged_column(table: pa.Table, name: str, dtype: npt.DTypeLike) -> Ragged:
    column = table.column(name)
    array: pa.ListArray = column.chunk(0) if column.num_chunks else column.combine_chunks()
    # A null list is empty; its offsets may say otherwise.
    lengths = np.diff(array.offsets.to_numpy())
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    values = array.flatten()
    if values.null_count:
        if pa.types.is_floating(values.type):
            values = values.fill_null(float("nan"))
        elif pa.types.is_integer(values.type):
            values = values.fill_null(-1)
        else:
            raise ArrowError(f"column {name} holds nulls")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(values.to_numpy(zero_copy_only=False).astype(dtype, copy=False), offsets)


def list_array(column: Ragged, kind: pa.DataType) -> pa.ListArray:
    """A ragged column as an Arrow list array."""
    return pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values, kind))


def _write(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def validation_fault(error: ValidationError, whole: str = "rollout") -> Fault:
    """The first thing that a model refused, as a fault with its field; `whole` names what is wrong as a whole."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    code = "missing_field" if first["type"] == "missing" else "invalid_field"
    return Fault(code, field, f"{field}: {first['msg']}")


def _parsed(text: str | None, model: type[WireModel], seen: dict[str | None, Any]) -> Any:
    """The model that a JSON text is, each text read once; what it holds instead, if it is no such model."""
    if text not in seen:
        value = from_json(text) if text else None
        try:
            seen[text] = model.model_validate(value)
        except ValidationError:  # to be told together with what else is wrong with its row
            seen[text] = value
    return seen[text]


def decode_rollouts(data: bytes) -> RolloutColumns:
    """Reads an arrival's Arrow stream. A row without a whole identity becomes a Fault; ArrowError refuses all."""
    table = _read_table(data, ROLLOUT_SCHEMA, LARGEST_BATCH, optional=MAY_BE_LEFT_OUT)
    if (pc.sum(pc.list_value_length(table.column("spans"))).as_py() or 0) > len(data) // 64:
        raise ArrowError("column spans has more entries than their hashes, of 64 digits each, would have room for")
    blobs = [
        name for name in ("token_ids", "action_mask", "behavior_log_probs", "side_data") if name in table.schema.names
    ]
    rows = table.drop_columns(blobs).to_pylist()
    identities: list[RolloutIdentity | Fault] = []
    contracts: dict[str | None, Any] = {}
    generations: dict[str | None, Any] = {}
    for row in rows:
        parsed = {}
        try:
            if row.get("reward") is not None:
                parsed["reward"] = from_json(row["reward"])
            parsed["contract"] = _parsed(row["contract"], GenerationContract, contracts)
            parsed["generation"] = _parsed(row["generation"] or "{}", Generation, generations)
            identities.append(
                RolloutIdentity.model_validate({k: v for k, v in (row | parsed).items() if v is not None})
            )
        except ValidationError as error:
            contracts.clear()  # a refused row's may be large
            generations.clear()
            identities.append(validation_fault(error))
        except ValueError as error:
            contracts.clear()
            generations.clear()
            identities.append(Fault("invalid_field", "contract", f"contract, generation or reward is no JSON: {error}"))
    return RolloutColumns(
        identities,
        [row["rollout_id"] for row in rows],
        _ragged_column(table, "token_ids", np.int64),
        _ragged_column(table, "action_mask", np.bool_),
        _ragged_column(table, "behavior_log_probs", np.float32),
        table.column("side_data").to_pylist() if "side_data" in table.schema.names else [None] * len(rows),
    )


def rollout_columns(rollouts: Sequence[Rollout]) -> RolloutColumns:
    """The columns of rollouts that came as models."""
    with np.errstate(over="ignore"):
        log_probs = ragged([[np.nan if v is None else v for v in r.behavior_log_probs] for r in rollouts], np.float32)
    return RolloutColumns(
        [RolloutIdentity.model_validate(_identity_fields(r)) for r in rollouts],
        [r.rollout_id for r in rollouts],
        ragged([r.token_ids for r in rollouts], np.int64),
        ragged([r.action_mask for r in rollouts], np.bool_),
        log_probs,
        [r.side_data for r in rollouts],
    )


def _identity_fields(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in RolloutIdentity.model_fields}


def encode_rollouts(columns: RolloutColumns) -> bytes:
    """An arrival's Arrow stream. ValueError where an identity is a Fault."""
    identities: list[RolloutIdentity] = []
    for identity in columns.identities:
        if isinstance(identity, Fault):
            raise ValueError(f"cannot send a rollout that is at fault: {identity.detail}")
        identities.append(identity)
    scalars = {
        name: pa.array([getattr(i, name) for i in identities], ROLLOUT_SCHEMA.field(name).type)
        for name in (
            "rollout_id", "task_id", "task_source", "group_id", "sample_index", "attempt",
            "span_source", "worker_id", "incarnation",
        )
    }  # fmt: skip
    arrays = scalars | {
        "spans": pa.array([[s.model_dump() for s in i.spans] for i in identities], pa.list_(_SPAN)),
        "contract": pa.array([i.contract.model_dump_json() for i in identities]),
        "generation": pa.array([i.generation.model_dump_json(exclude_none=True) for i in identities]),
        "token_ids": list_array(columns.token_ids, pa.int32()),
        "action_mask": list_array(columns.action_mask, pa.bool_()),
        "behavior_log_probs": list_array(columns.behavior_log_probs, pa.float32()),
        "row_starts": pa.array([i.row_starts for i in identities], pa.list_(pa.int32())),
        "side_data": pa.array(columns.side_data, pa.binary()),
        "side_data_digest": pa.array([i.side_data_digest for i in identities], pa.utf8()),
        "reward": pa.array(
            [i.reward.model_dump_json(exclude_none=True) if i.reward else None for i in identities], pa.utf8()
        ),
    }
    return _write(pa.table([arrays[name] for name in ROLLOUT_SCHEMA.names], schema=ROLLOUT_SCHEMA))


@dataclass(frozen=True)
class CandidateColumns:
    """Candidates: one entry per rollout in the scalar lists; evidence as in RolloutColumns."""

    rollout_id: list[str]
    revision: list[int]
    group_id: list[str]
    task_id: list[str]
    task_source: list[str]
    sample_index: list[int]
    attempt: list[int]
    policy_version: list[int]
    lag: list[int]
    reward: list[float]
    token_ids: Ragged
    action_mask: Ragged
    behavior_log_probs: Ragged
    row_starts: list[list[int]]
    side_data: list[bytes | None]
    groups: list[str]
    empty: EmptyReason | None
    contract_hash: str | None = None
    reserved: list[ReserveVerdict] | None = None

    def __len__(self) -> int:
        return len(self.rollout_id)

    def to_model(self) -> Candidates:
        """The same as a JSON model."""
        rollouts = [
            CandidateRollout(
                rollout_id=self.rollout_id[i],
                revision=self.revision[i],
                group_id=self.group_id[i],
                task_id=self.task_id[i],
                task_source=self.task_source[i],
                sample_index=self.sample_index[i],
                attempt=self.attempt[i],
                policy_version=self.policy_version[i],
                lag=self.lag[i],
                reward=self.reward[i],
                token_ids=self.token_ids[i].tolist(),
                action_mask=self.action_mask[i].tolist(),
                behavior_log_probs=nulls_for_nan(self.behavior_log_probs[i]),
                row_starts=self.row_starts[i],
                side_data=base64_text(self.side_data[i]),
            )
            for i in range(len(self))
        ]
        return Candidates(
            rollouts=rollouts,
            groups=self.groups,
            empty=self.empty,
            contract_hash=self.contract_hash,
            reserved=self.reserved,
        )


def nulls_for_nan(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    """JSON has no NaN: a masked log-prob that is not finite becomes null."""
    return [float(v) if np.isfinite(v) else None for v in values]


def base64_text(blob: bytes | None) -> str | None:
    """JSON has no bytes."""
    return None if blob is None else base64.b64encode(blob).decode()


_CANDIDATE_SCALARS = (
    "rollout_id", "revision", "group_id", "task_id", "task_source", "sample_index", "attempt", "policy_version", "lag",
    "reward", "row_starts", "side_data",
)  # fmt: skip


def encode_candidates(columns: CandidateColumns) -> bytes:
    """The Arrow stream of a candidates answer."""
    arrays = {
        name: pa.array(getattr(columns, name), CANDIDATE_SCHEMA.field(name).type) for name in _CANDIDATE_SCALARS
    } | {
        "token_ids": list_array(columns.token_ids, pa.int32()),
        "action_mask": list_array(columns.action_mask, pa.bool_()),
        "behavior_log_probs": list_array(columns.behavior_log_probs, pa.float32()),
    }
    metadata = {
        "groups": json.dumps(columns.groups),
        "empty": columns.empty.model_dump_json() if columns.empty else "null",
        "contract_hash": json.dumps(columns.contract_hash),
        "reserved": json.dumps(columns.reserved and [verdict.model_dump() for verdict in columns.reserved]),
    }
    schema = CANDIDATE_SCHEMA.with_metadata(metadata)
    return _write(pa.table([arrays[name] for name in CANDIDATE_SCHEMA.names], schema=schema))


_NAMES = TypeAdapter(list[str])
_TEXT = TypeAdapter(str | None)
_RESERVED = TypeAdapter(list[ReserveVerdict] | None)
_EMPTY = TypeAdapter(EmptyReason | None)


def decode_candidates(data: bytes) -> CandidateColumns:
    """Reads a candidates answer. ArrowError where it is none."""
    table = _read_table(
        data, CANDIDATE_SCHEMA, len(data) // 32, pass_over=True
    )  # 11 columns take at least 4 bytes each
    metadata = table.schema.metadata or {}
    try:
        groups = _NAMES.validate_json(metadata.get(b"groups", b"[]"), strict=True)
        empty = _EMPTY.validate_json(metadata.get(b"empty", b"null"))
        contract_hash = _TEXT.validate_json(metadata.get(b"contract_hash", b"null"), strict=True)
        reserved = _RESERVED.validate_json(metadata.get(b"reserved", b"null"))
    except ValidationError as error:
        raise ArrowError(f"the schema's metadata is not that of candidates: {str(error)[:200]}") from error
    nulls = [name for name in table.column_names if name != "side_data" and table.column(name).null_count]
    if nulls:
        raise ArrowError(f"columns hold nulls: {nulls}")
    return CandidateColumns(
        **{name: table.column(name).to_pylist() for name in _CANDIDATE_SCALARS},
        token_ids=_ragged_column(table, "token_ids", np.int64),
        action_mask=_ragged_column(table, "action_mask", np.bool_),
        behavior_log_probs=_ragged_column(table, "behavior_log_probs", np.float32),
        groups=groups,
        empty=empty,
        contract_hash=contract_hash,
        reserved=reserved,
    )


@dataclass(frozen=True)
class EvidenceColumns:
    """The tokens of many rollouts, in one order; evidence as in RolloutColumns."""

    rollout_id: list[str]
    token_ids: Ragged
    action_mask: Ragged
    behavior_log_probs: Ragged
    row_starts: list[list[int]]
    side_data: list[bytes | None]
    side_data_digest: list[str | None]
    missing: list[str]

    def __len__(self) -> int:
        return len(self.rollout_id)

    def to_model(self) -> EvidenceAnswer:
        """The same as a JSON model."""
        rollouts = [
            RolloutEvidence(
                rollout_id=self.rollout_id[i],
                token_ids=self.token_ids[i].tolist(),
                action_mask=self.action_mask[i].tolist(),
                behavior_log_probs=nulls_for_nan(self.behavior_log_probs[i]),
                row_starts=tuple(self.row_starts[i]),
                side_data=base64_text(self.side_data[i]),
                side_data_digest=self.side_data_digest[i],
            )
            for i in range(len(self))
        ]
        return EvidenceAnswer(rollouts=rollouts, missing=self.missing)


_EVIDENCE_SCALARS = ("rollout_id", "row_starts", "side_data", "side_data_digest")


def encode_evidence(columns: EvidenceColumns) -> bytes:
    """The Arrow stream of an evidence answer."""
    arrays = {
        name: pa.array(getattr(columns, name), EVIDENCE_SCHEMA.field(name).type) for name in _EVIDENCE_SCALARS
    } | {
        "token_ids": list_array(columns.token_ids, pa.int32()),
        "action_mask": list_array(columns.action_mask, pa.bool_()),
        "behavior_log_probs": list_array(columns.behavior_log_probs, pa.float32()),
    }
    schema = EVIDENCE_SCHEMA.with_metadata({"missing": json.dumps(columns.missing)})
    return _write(pa.table([arrays[name] for name in EVIDENCE_SCHEMA.names], schema=schema))


def decode_evidence(data: bytes) -> EvidenceColumns:
    """Reads an evidence answer. ArrowError where it is none."""
    table = _read_table(data, EVIDENCE_SCHEMA, len(data) // 28, pass_over=True)  # 7 columns of 4 bytes or more
    try:
        missing = _NAMES.validate_json((table.schema.metadata or {}).get(b"missing", b"[]"), strict=True)
    except ValidationError as error:
        raise ArrowError(f"the schema's metadata is not that of evidence: {str(error)[:200]}") from error
    return EvidenceColumns(
        **{name: table.column(name).to_pylist() for name in _EVIDENCE_SCALARS},
        token_ids=_ragged_column(table, "token_ids", np.int64),
        action_mask=_ragged_column(table, "action_mask", np.bool_),
        behavior_log_probs=_ragged_column(table, "behavior_log_probs", np.float32),
        missing=missing,
    )


@dataclass(frozen=True)
class ReserveColumns:
    """A reservation. `current_log_probs` is float64; `given[i]` says whether rollout i came with any."""

    owner: str
    after_commit_no: int
    confirm_drift: bool
    rollout_id: list[str]
    revision: list[int]
    use: list[str | None]
    given: list[bool]
    current_log_probs: Ragged

    def __len__(self) -> int:
        return len(self.rollout_id)


def reserve_columns(request: ReserveRequest) -> ReserveColumns:
    """The columns of a reservation that came as a model."""
    items = request.rollouts
    return ReserveColumns(
        request.owner,
        request.after_commit_no,
        request.confirm_drift,
        [item.rollout_id for item in items],
        [item.revision for item in items],
        [item.use for item in items],
        [item.current_log_probs is not None for item in items],
        ragged([[np.nan if v is None else v for v in item.current_log_probs or ()] for item in items], np.float64),
    )


def encode_reserve(columns: ReserveColumns) -> bytes:
    """A reservation's Arrow stream; log-probs are sent as they are, float64."""
    request = {
        "owner": columns.owner,
        "after_commit_no": columns.after_commit_no,
        "confirm_drift": columns.confirm_drift,
    }
    offsets = [int(o) if g else None for o, g in zip(columns.current_log_probs.offsets, columns.given, strict=False)]
    log_probs = pa.ListArray.from_arrays(
        pa.array([*offsets, int(columns.current_log_probs.offsets[-1])], pa.int32()),
        pa.array(columns.current_log_probs.values, pa.float64()),
    )
    schema = pa.schema(
        [
            ("rollout_id", pa.utf8()),
            ("revision", pa.int32()),
            ("current_log_probs", pa.list_(pa.float64())),
            ("use", pa.utf8()),
        ],
        metadata={"request": json.dumps(request)},
    )
    return _write(pa.table([pa.array(columns.rollout_id), columns.revision, log_probs, columns.use], schema=schema))


_ITEMS = TypeAdapter(list[ReserveItem])
_ANY_ITEM = ReserveItem(rollout_id="any", revision=0)


def decode_reserve(data: bytes) -> ReserveColumns:
    """Reads a reservation's Arrow stream. ArrowError, or pydantic's ValidationError, where it is wrong."""
    table = _read_table(data, RESERVE_SCHEMA, LARGEST_RESERVATION, frozenset({"current_log_probs"}))
    try:
        request = from_json((table.schema.metadata or {})[b"request"])
    except (KeyError, ValueError) as error:
        raise ArrowError("the schema's metadata holds no 'request' as JSON") from error
    if not isinstance(request, dict):
        raise ArrowError("the metadata's 'request' is not an object")
    ids, revisions, uses = (table.column(n).to_pylist() for n in ("rollout_id", "revision", "use"))
    # The same limits as for JSON, from the same model.
    model = ReserveRequest.model_validate(request | {"rollouts": [_ANY_ITEM] * len(ids)})
    items = [{"rollout_id": r, "revision": v, "use": u} for r, v, u in zip(ids, revisions, uses, strict=True)]
    try:
        _ITEMS.validate_python(items)
    except ValidationError:
        for item in items:  # names the field as one item does, without its place in the list
            ReserveItem.model_validate(item)
        raise
    column = table.column("current_log_probs")
    given = [bool(v) for v in column.is_valid().to_pylist()]
    return ReserveColumns(
        model.owner,
        model.after_commit_no,
        model.confirm_drift,
        ids,
        revisions,
        uses,
        given,
        _ragged_column(table, "current_log_probs", np.float64),
    )
