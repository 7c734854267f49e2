"""The manifest of a policy artifact, its canonical bytes, and the hash that names its content for good.

The version is no part of it: the same files under two version numbers have one hash, which is how a rollback
is recognised. Artifacts of kind ``stream`` leave no files and are hashed tensor by tensor, not by a manifest.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath

MANIFEST_KINDS: tuple[str, ...] = ("base", "full", "lora")
"""Kinds of artifact that a manifest describes. ``base`` is a base model by name and has no files."""

MAX_NAME_LENGTH = 255
"""Longest file name in characters, folders included; also the longest part in bytes, as on disk."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DRIVE = re.compile(r"[A-Za-z]:")


def check_file_name(name: str) -> None:
    """Accept a file name that every worker can write below its own folder, and none that leads out of it.

    Forward slashes make subfolders. Raises ValueError for an empty or too long name, an absolute path (a
    drive letter included), a backslash, a control character, line separator or lone surrogate, and for a part
    that is empty or begins or ends with a space or a dot, ``.`` and ``..`` included.
    """
    if not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"file name must have 1 to {MAX_NAME_LENGTH} characters, not {len(name)}")
    if name.startswith("/") or _DRIVE.match(name):
        raise ValueError(f"file name is an absolute path: {name!r}")
    if "\\" in name:
        raise ValueError(f"file name holds a backslash: {name!r}")
    if any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in name):
        raise ValueError(f"file name holds a control character: {name!r}")
    for part in name.split("/"):
        if not part:
            raise ValueError(f"file name has an empty part: {name!r}")
        if part != part.strip() or part != part.strip("."):
            raise ValueError(f"file name has a part that begins or ends with a space or a dot: {name!r}")
        if len(part.encode()) > MAX_NAME_LENGTH:
            raise ValueError(f"file name has a part of more than {MAX_NAME_LENGTH} bytes: {name!r}")


def canonical_manifest(
    kind: str, base_model: Mapping[str, object] | None, files: Iterable[Mapping[str, object]]
) -> bytes:
    """The one byte sequence that stands for this content, whatever order it was given in.

    ``base_model`` is None or ``name``, ``revision`` and ``sha256``; each of ``files`` is ``name``, ``size``
    (bytes) and ``sha256`` (64 lower-case hex digits). The result is JSON in UTF-8 without blanks or escapes
    beyond JSON's own, keys sorted, files sorted by name in code point order.

    Raises ValueError for an unknown kind, keys other than these, a name that ``check_file_name`` refuses,
    that occurs twice or that is also a folder of another, a size or hash of the wrong form, kind ``base``
    with files or without a base model, and another kind without files.
    """
    if kind not in MANIFEST_KINDS:
        raise ValueError(f"kind must be one of {', '.join(MANIFEST_KINDS)}, not {kind!r}")
    entries = sorted((_file(entry) for entry in files), key=lambda entry: str(entry["name"]))
    _check_distinct([str(entry["name"]) for entry in entries])
    if kind == "base" and (entries or base_model is None):
        raise ValueError("an artifact of kind base has a base model and no files")
    if kind != "base" and not entries:
        raise ValueError(f"an artifact of kind {kind} has at least one file")
    content = {
        "base_model": None if base_model is None else _base(base_model),
        "files": entries,
        "kind": kind,
    }
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def artifact_hash(kind: str, base_model: Mapping[str, object] | None, files: Iterable[Mapping[str, object]]) -> str:
    """sha256 of ``canonical_manifest``, as 64 lower-case hex digits; raises ValueError as it does."""
    return sha256(canonical_manifest(kind, base_model, files)).hexdigest()


def stream_hash(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """The artifact hash of weights that are pushed to engines and leave no files, as 64 lower-case hex digits.

    Each of ``tensors`` is its name, the name of its dtype (``bfloat16``), its shape, and the sha256 of its bytes as
    they are sent: contiguous, little-endian. sha256 over the JSON list of them in UTF-8 without blanks, each a list of
    the four, sorted by name; so either side may hash one tensor after the other as they pass, in any order.

    Raises ValueError for no tensors, a name that is empty or occurs twice, a negative size, and a hash of the wrong
    form.
    """
    listed: list[tuple[str, str, list[int], str]] = sorted(
        (name, dtype, list(shape), _digest(name, digest)) for name, dtype, shape, digest in tensors
    )
    names = {name for name, *_ in listed}
    if not listed or "" in names or len(names) < len(listed):
        raise ValueError("a stream has at least one tensor, each with a name of its own")
    if any(type(size) is not int or size < 0 for _, _, shape, _ in listed for size in shape):
        raise ValueError("the sizes of a tensor are non-negative ints")
    return sha256(json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def _file(entry: Mapping[str, object]) -> dict[str, object]:
    _check_keys("a file", entry, {"name", "size", "sha256"})
    name, size = entry["name"], entry["size"]
    if not isinstance(name, str):
        raise ValueError(f"file name must be a string, not {name!r}")
    check_file_name(name)
    if type(size) is not int or size < 0:
        raise ValueError(f"size of {name!r} must be a non-negative int, not {size!r}")
    return {"name": name, "size": size, "sha256": _digest(name, entry["sha256"])}


def _base(base_model: Mapping[str, object]) -> dict[str, object]:
    _check_keys("base_model", base_model, {"name", "revision", "sha256"})
    for key in ("name", "revision"):
        value = base_model[key]
        if not isinstance(value, str) or not value:
            raise ValueError(f"base_model {key} must be a non-empty string, not {value!r}")
    return {**base_model, "sha256": _digest("base_model", base_model["sha256"])}


def _check_keys(name: str, given: Mapping[str, object], expected: set[str]) -> None:
    if given.keys() != expected:
        raise ValueError(f"{name} must have exactly {sorted(expected)}, not {sorted(given)}")


def _digest(name: str, digest: object) -> str:
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"sha256 of {name!r} must be 64 lower-case hex digits, not {digest!r}")
    return digest


def _check_distinct(names: list[str]) -> None:
    known = set(names)
    if len(known) < len(names):
        raise ValueError("two files have one name")
    for name in names:
        for folder in PurePosixPath(name).parents:
            if str(folder) in known:
                raise ValueError(f"{str(folder)!r} is both a file and the folder of {name!r}")
