"""The addresses of the files of policy versions: upload, download, commit."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, BinaryIO, cast

from fastapi import APIRouter, Depends, Header, Query, Request, Response, status
from fastapi.responses import StreamingResponse

from coordinator.addresses import FileName, RunId, VersionNumber
from coordinator.errors import Refusal, refusals
from coordinator.operations.access import Anyone, ChangesHere, DatabaseHere, GuardedRoute, Trainer
from coordinator.policies import files
from coordinator.policies.endpoints import LocationsHere
from coordinator.policies.verification import Verifier
from coordinator.storage.artifacts import CHUNK, ArtifactStore
from coordinator.wire.policies import FileUpload, PolicyView

router = APIRouter(prefix="/v1/runs/{run_id}/policies/{version}", tags=["policies"], route_class=GuardedRoute)


async def store_of(request: Request) -> ArtifactStore:
    """The app's artifact store."""
    return cast(ArtifactStore, request.app.state.artifacts)


async def verifier_of(request: Request) -> Verifier:
    """What verifies the app's large artifacts."""
    return cast(Verifier, request.app.state.verifier)


Store = Annotated[ArtifactStore, Depends(store_of)]
VerifierHere = Annotated[Verifier, Depends(verifier_of)]
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _header(description: str, example: str) -> dict[str, Any]:
    return {"required": True, "schema": {"type": "string"}, "description": description, "example": example}


_ETAG = '"' + "5e" * 32 + '"'
_FILE_HEADERS = {
    "ETag": _header("the file's sha256, in quotes", _ETAG),
    "Accept-Ranges": _header("a download that broke off may go on with Range", "bytes"),
}
DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole file", "content": _BYTES, "headers": _FILE_HEADERS},
    206: {
        "description": "The bytes that Range names",
        "content": _BYTES,
        "headers": _FILE_HEADERS | {"Content-Range": _header("which bytes of how many these are", "bytes 2-61/62")},
    },
}
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")


@router.get(
    "/uploads/{name:path}",
    responses=refusals("run_unknown", "policy_version_unknown", "artifact_file_unknown", "policy_state"),
)
async def get_upload(
    run_id: RunId, version: VersionNumber, name: FileName, caller: Trainer, database: DatabaseHere, store: Store
) -> FileUpload:
    """Ask how much of a file is here: an upload that was broken off goes on with the byte after that.

    Bytes that any version of any run has brought here are `stored` already, and need not be sent.
    """
    return await files.received(database, store, run_id, version, name)


@router.put(
    "/files/{name:path}",
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "artifact_file_unknown",
        "artifact_file_mismatch",
        "policy_state",
        "upload_offset",
        "upload_busy",
        "no_space",
    ),
    openapi_extra=UPLOAD,
)
async def upload_file(
    run_id: RunId,
    version: VersionNumber,
    name: FileName,
    request: Request,
    caller: Trainer,
    database: DatabaseHere,
    store: Store,
    offset: Annotated[
        int | None,
        Query(
            ge=0,
            le=2**53,
            description="the body goes on at this byte, at most as many as have arrived, with the rest of the file or "
            "a part of it; left out: it is the whole file",
        ),
    ] = None,
) -> FileUpload:
    """Upload one file of the artifact as raw bytes; it is kept only if size and sha256 are the manifest's.

    What arrived before the connection broke stays for an hour. What is answered as received is on disk.

    Sent again: a file that is here answers `stored`. After a break, ask how much is here and send the rest with
    `offset`.
    """
    return await files.upload(database, store, run_id, version, name, request.stream(), offset)


@router.get(
    "/files/{name:path}",
    response_class=StreamingResponse,
    responses=refusals(
        "run_unknown",
        "policy_version_unknown",
        "artifact_file_unknown",
        "artifact_file_missing",
        "range_not_satisfiable",
    )
    | DOWNLOAD,
)
async def download_file(
    run_id: RunId,
    version: VersionNumber,
    name: FileName,
    caller: Anyone,
    database: DatabaseHere,
    store: Store,
    wanted: Annotated[
        str | None,
        Header(
            alias="Range",
            max_length=1000,
            description="bytes=first- or bytes=first-last; anything else gets the whole file",
            examples=["bytes=10-"],
        ),
    ] = None,
    unless_changed: Annotated[
        str | None,
        Header(
            alias="If-Range",
            max_length=1000,
            description="the ETag that Range is about; another gets the whole file",
            examples=[_ETAG],
        ),
    ] = None,
) -> StreamingResponse:
    """Download one file of the artifact, or the rest of one that was cut off. The ETag is its sha256.

    Compare size and sha256 with the manifest before the engine reads it. `Range: bytes=N-` goes on at byte N.
    """
    entry, file = await files.find(database, store, run_id, version, name)
    size = os.fstat(file.fileno()).st_size
    etag = f'"{entry.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes"}
    asked = _RANGE.fullmatch(wanted or "")
    if asked is None or (asked[2] and int(asked[2]) < int(asked[1])) or unless_changed not in (None, etag):
        first, last, code = 0, size - 1, status.HTTP_200_OK
    elif int(asked[1]) >= size:
        file.close()
        raise Refusal("range_not_satisfiable", f"{name} has {size} bytes", {"Content-Range": f"bytes */{size}"})
    else:
        first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
        code = status.HTTP_206_PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    headers["Content-Length"] = str(last + 1 - first)
    parts = _parts(store, file, first, last + 1 - first)
    return StreamingResponse(parts, code, headers, media_type="application/octet-stream")


async def _parts(store: ArtifactStore, file: BinaryIO, first: int, count: int) -> AsyncIterator[bytes]:
    """The bytes of an open file, which is closed afterwards."""
    try:
        file.seek(first)
        while count and (part := await store.on_disk(file.read, min(CHUNK, count))):
            count -= len(part)
            yield part
    finally:
        file.close()


@router.post(
    "/commit",
    responses=refusals("run_unknown", "policy_version_unknown", "artifact_incomplete", "policy_state")
    | {202: {"model": PolicyView, "description": "Its files are read in the background; ask for the version again"}},
)
async def commit_policy(
    run_id: RunId,
    version: VersionNumber,
    caller: Trainer,
    database: DatabaseHere,
    changes: ChangesHere,
    store: Store,
    locations: LocationsHere,
    verifier: VerifierHere,
    response: Response,
) -> PolicyView:
    """Commit a version once every file is there; each is read again and its hash compared.

    Up to 64 MiB of uploaded files are read in this call. Otherwise the answer is 202, and the version's `verification`
    says how far it is; it goes on when coordinators are killed, and ends with the commit or with the names of the files
    that are missing or changed.

    Sent again: the version as it stands; after a refusal the check begins anew.
    """
    view = await files.commit(database, store, locations, run_id, version, caller)
    if view.state == "prepared":
        response.status_code = status.HTTP_202_ACCEPTED
        await verifier.take_up()
    changes.announce(run_id)
    return view
