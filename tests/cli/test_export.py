"""rollouts export: every rollout once with its evidence, in pieces, and null where retention dropped it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coordinator.cli import export
from coordinator.client import Coordinator, Run
from coordinator.storage.postgres import EmbeddedPostgres
from coordinator.wire.rollouts import GenerationFailure
from tests.cli.conftest import Command
from tests.client.runs import group, new_run, new_worker
from tests.client.server_process import ServerProcess


def test_all_of_a_run_is_exported_as_the_api_has_it(cli: Command, sums: Run, tmp_path: Path) -> None:
    file = tmp_path / "sums.parquet"
    done = cli("rollouts", "export", "sums", str(file))
    assert (done.code, done.out, done.err) == (0, "", f"8 rollouts are in {file}\n")
    table = pq.read_table(file)
    assert table.schema.equals(export.SCHEMA)
    metadata = table.schema.metadata
    assert (metadata[b"coordinator.run_id"], metadata[b"coordinator.filters"]) == (b"sums", b"{}")
    views = list(sums.rollouts())
    for view, row in zip(views, table.to_pylist(), strict=True):
        evidence = sums.evidence(view.rollout_id)
        assert json.loads(row.pop("generation")) == view.generation.model_dump(exclude_none=True)
        assert (row.pop("token_ids"), row.pop("action_mask")) == (evidence.token_ids, evidence.action_mask)
        log_probs = [None if np.isnan(value) else value for value in row.pop("behavior_log_probs")]
        assert log_probs == evidence.behavior_log_probs
        assert (row.pop("side_data"), row["side_data_digest"]) == (None, None)
        assert row.pop("spans") == [span.model_dump() for span in view.spans]
        assert (tuple(row.pop("flags")), tuple(row.pop("row_starts"))) == (view.flags, view.row_starts)
        assert row == view.model_dump(include=row.keys())


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (("--state", "consumed"), ["g0:0.0", "g0:1.0"]),
        (("--group", "unrewarded", "--version", "0"), ["unrewarded:0.0", "unrewarded:1.0"]),
        (("--version", "7"), []),
    ],
)
def test_filters_choose_what_is_exported(
    cli: Command, sums: Run, tmp_path: Path, filters: tuple[str, ...], ids: list[str]
) -> None:
    assert cli("rollouts", "export", "sums", str(tmp_path / "some.parquet"), *filters).code == 0
    table = pq.read_table(tmp_path / "some.parquet")
    assert table.column("rollout_id").to_pylist() == ids
    assert table.schema.equals(export.SCHEMA)


def test_pieces_are_small_and_progress_is_told(
    cli: Command, sums: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_CHUNK_TOKENS", 12)
    monkeypatch.setattr(export, "_ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(export, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(export, "_EVERY_SECONDS", 0.0)
    asked: list[int] = []
    read = Run.evidence_of

    def counted(run: Run, rollout_ids: list[str]) -> object:
        asked.append(len(rollout_ids))
        return read(run, rollout_ids)

    monkeypatch.setattr(Run, "evidence_of", counted)
    done = cli("rollouts", "export", "sums", str(tmp_path / "pieces.parquet"))
    assert asked == [2, 2, 2, 2]
    assert done.err.splitlines()[:2] == ["2 of 8 rollouts so far", "4 of 8 rollouts so far"]
    file = pq.ParquetFile(tmp_path / "pieces.parquet")
    assert (file.metadata.num_row_groups, file.metadata.num_rows) == (4, 8)


def test_what_has_no_tokens_is_there_without_them(
    cli: Command, coordinator: Coordinator, server: ServerProcess, tmp_path: Path
) -> None:
    run = new_run(coordinator)
    worker = new_worker(run)
    run.submit(group(worker, run.view().active, "kept") + group(worker, run.view().active, "old"))
    failed = GenerationFailure(
        rollout_id="none", task_id="t", task_source="s", group_id="none", sample_index=0, worker_id="w1",
        incarnation="w1-1", message="out of memory",
    )  # fmt: skip
    run.report_generation_failures([failed])

    async def drop() -> None:
        connection = await asyncpg.connect(url.replace("+asyncpg", ""))
        try:
            await connection.execute(
                "UPDATE rollout_evidence SET token_ids = NULL, action_mask = NULL, behavior_log_probs = NULL"
                " WHERE rollout_id LIKE 'old:%'"
            )
        finally:
            await connection.close()

    url = EmbeddedPostgres(server.data / "postgres").start()  # attaches: the server owns it
    asyncio.run(drop())
    assert cli("rollouts", "export", run.id, str(tmp_path / "x.parquet")).code == 0
    rows = {row["rollout_id"]: row for row in pq.read_table(tmp_path / "x.parquet").to_pylist()}
    assert [rows[name]["token_ids"] for name in ("kept:0.0", "old:0.0", "none")] == [[1, 2, 3, 4, 5], None, None]
    assert rows["old:0.0"]["behavior_log_probs"] is rows["old:0.0"]["action_mask"] is None
    assert (rows["old:0.0"]["tokens"], len(rows["old:0.0"]["spans"])) == (5, 1)
    assert (rows["none"]["state"], rows["none"]["contract_hash"]) == ("generation_failed", None)


def test_a_file_appears_whole_or_not_at_all(
    cli: Command, sums: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sums.parquet"
    file.write_text("mine")
    there = cli("rollouts", "export", "sums", str(file))
    assert (there.code, file.read_text()) == (2, "mine")
    assert there.err == f"coordinator: {file} is there already\n  Name another file, or say --overwrite.\n"
    unknown = cli("rollouts", "export", "nowhere", str(file), "--overwrite")
    assert (unknown.code, file.read_text(), list(tmp_path.iterdir())) == (1, "mine", [file])

    def breaks(run: Run, rollout_ids: list[str]) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "evidence_of", breaks)
        ended = cli("rollouts", "export", "sums", str(file), "--overwrite")
    assert (ended.code, file.read_text(), list(tmp_path.iterdir())) == (130, "mine", [file])
    assert cli("rollouts", "export", "sums", str(file), "--overwrite").code == 0
    assert pa.parquet.read_metadata(file).num_rows == 8
    nowhere = cli("rollouts", "export", "sums", str(tmp_path / "none" / "x.parquet"))
    assert (nowhere.code, nowhere.out) == (1, "")
    assert "none" in nowhere.err


def test_an_export_that_is_begun_twice_leaves_one_whole_file(
    cli: Command, sums: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a timer begins the next one while the last still reads."""
    read, file = Run.evidence_of, tmp_path / "twice.parquet"

    def meanwhile(run: Run, rollout_ids: list[str]) -> object:
        monkeypatch.setattr(Run, "evidence_of", read)
        assert export.export(sums, file, state=None, group_id="g0", version=None, overwrite=True) == 2
        return read(run, rollout_ids)

    monkeypatch.setattr(Run, "evidence_of", meanwhile)
    assert cli("rollouts", "export", "sums", str(file)).code == 0
    assert pq.read_table(file).num_rows == 8
    assert list(tmp_path.iterdir()) == [file]
