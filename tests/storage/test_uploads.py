"""Uploads under way: one writer at a time, going on, taking over, giving up."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.storage import uploads
from coordinator.storage.artifacts import ArtifactStore, NoSpaceError, UploadOffsetError

CONTENT = b"0123456789" * 100
SHA = hashlib.sha256(CONTENT).hexdigest()


def begin(folder: Path, offset: int, run: str = "run") -> uploads.Upload:
    return uploads.begin(folder, run, SHA, len(CONTENT), offset)


def written(folder: Path, count: int) -> None:
    upload = begin(folder, 0)
    upload.write(CONTENT[:count])
    upload.close()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_it_goes_on_at_any_byte_that_has_come(tmp_path: Path) -> None:
    written(tmp_path, 500)
    assert uploads.received(tmp_path, "run", SHA) == (500, False)
    upload = begin(tmp_path, 400)
    assert uploads.received(tmp_path, "run", SHA) == (400, True)
    upload.write(CONTENT[400:600])
    upload.close()
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == CONTENT[:600]
    with pytest.raises(UploadOffsetError) as caught:
        begin(tmp_path, 601)
    assert caught.value.received == 600
    with pytest.raises(UploadOffsetError):
        begin(tmp_path, 600, "another-run")


def test_one_that_is_written_to_is_not_for_others(tmp_path: Path) -> None:
    first = begin(tmp_path, 0)
    first.write(CONTENT[:500])
    with pytest.raises(uploads.UploadBusyError):
        begin(tmp_path, 500)
    second = begin(tmp_path, 0)  # but each may send the whole of it
    assert second.path != first.path
    first.close()
    second.close()


def test_a_silent_writer_is_overtaken_and_hurts_nobody_when_it_wakes(tmp_path: Path) -> None:
    first = begin(tmp_path, 0)
    first.write(CONTENT[:500])
    os.utime(first.path, (0, time.time() - uploads.SILENT_SECONDS - 1))
    assert uploads.received(tmp_path, "run", SHA) == (500, False)
    second = begin(tmp_path, 450)
    second.write(CONTENT[450:])
    first.write(b"x" * 500)
    assert second.hexdigest() == SHA
    second.rename(tmp_path / "whole")
    with pytest.raises(UploadOffsetError):
        first.rename(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == CONTENT
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_only_what_nobody_wrote_to_for_an_hour_is_given_up(tmp_path: Path) -> None:
    written(tmp_path, 500)
    assert uploads.remove_abandoned(tmp_path) == 0
    (path,) = tmp_path.iterdir()
    hour_ago = time.time() - uploads.ABANDONED_SECONDS
    os.utime(path, (0, hour_ago + 60))
    assert uploads.remove_abandoned(tmp_path) == 0
    os.utime(path, (0, hour_ago - 60))
    begin(tmp_path, 500).close()  # somebody goes on with it
    assert uploads.remove_abandoned(tmp_path) == 0
    os.utime(path, (0, hour_ago - 60))
    assert uploads.remove_abandoned(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError):
        uploads.begin(tmp_path, "run", SHA, 2**60, 0)
    assert list(tmp_path.iterdir()) == []


async def test_a_kill_between_the_last_byte_and_the_name_costs_nothing(tmp_path: Path) -> None:
    """The whole file lies there as an upload; the same request again names it, and no byte is sent."""
    store = ArtifactStore(tmp_path)
    written(tmp_path, len(CONTENT))

    async def nothing() -> AsyncIterator[bytes]:
        for chunk in ():
            yield chunk

    assert await store.put("run", SHA, len(CONTENT), nothing(), len(CONTENT)) == len(CONTENT)
    assert store.has(SHA, len(CONTENT))
    assert names(tmp_path) == [SHA]
    store.close()
