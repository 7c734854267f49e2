from hashlib import sha256
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.manifest import artifact_hash, canonical_manifest, check_file_name, stream_hash

A, B, C = "a" * 64, "b" * 64, "c" * 64
BASE = {"name": "Qwen/Qwen2.5-0.5B-Instruct", "revision": "7ae557604adf67be", "sha256": C}
FILES = [
    {"name": "weights/model.safetensors", "size": 988097824, "sha256": A},
    {"name": "config-é.json", "size": 0, "sha256": B},
]
BYTES = (
    b'{"base_model":{"name":"Qwen/Qwen2.5-0.5B-Instruct","revision":"7ae557604adf67be","sha256":"'
    + b"c" * 64
    + b'"},"files":[{"name":"config-\xc3\xa9.json","sha256":"'
    + b"b" * 64
    + b'","size":0},{"name":"weights/model.safetensors","sha256":"'
    + b"a" * 64
    + b'","size":988097824}],"kind":"lora"}'
)


def test_the_canonical_bytes_are_pinned():
    assert canonical_manifest("lora", BASE, FILES) == BYTES
    assert (
        artifact_hash("lora", BASE, FILES)
        == sha256(BYTES).hexdigest()
        == "4e506c7949fe54732ea6cabf92d618bbe1f0579a613c134f0cf18c072435cf72"
    )


def test_a_base_model_has_no_files():
    expected = b'{"base_model":{"name":"m","revision":"main","sha256":"' + b"a" * 64 + b'"},"files":[],"kind":"base"}'
    assert canonical_manifest("base", {"name": "m", "revision": "main", "sha256": A}, []) == expected


def test_a_full_model_needs_no_base():
    expected = b'{"base_model":null,"files":[{"name":"m","sha256":"' + b"a" * 64 + b'","size":1}],"kind":"full"}'
    assert canonical_manifest("full", None, iter([{"size": 1, "sha256": A, "name": "m"}])) == expected


@given(
    st.lists(
        st.from_regex(r"\A[a-z0-9éß]{1,8}(/[a-zA-Z]{1,3}[.][a-z]{2}){0,2}\Z"),
        unique=True,
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_of_files_and_keys_does_not_matter(names, random: Random):
    folders = {"/".join(name.split("/")[:i]) for name in names for i in range(1, name.count("/") + 1)}
    files = [{"name": name, "size": i, "sha256": A} for i, name in enumerate(names) if name not in folders]
    shuffled = [dict(random.sample(list(entry.items()), 3)) for entry in random.sample(files, len(files))]
    base = dict(random.sample(list(BASE.items()), 3))
    assert canonical_manifest("full", BASE, files) == canonical_manifest("full", base, shuffled)


def test_every_part_of_the_content_counts():
    hashes = {
        artifact_hash("lora", BASE, FILES),
        artifact_hash("full", BASE, FILES),
        artifact_hash("lora", None, FILES),
        artifact_hash("lora", BASE | {"revision": "main"}, FILES),
        artifact_hash("lora", BASE, FILES[:1]),
        artifact_hash("lora", BASE, [FILES[0] | {"size": 1}, FILES[1]]),
        artifact_hash("lora", BASE, [FILES[0] | {"sha256": B}, FILES[1]]),
        artifact_hash("lora", BASE, [FILES[0] | {"name": "weights/other.safetensors"}, FILES[1]]),
    }
    assert len(hashes) == 8


@pytest.mark.parametrize(
    ("kind", "base_model", "files"),
    [
        ("stream", None, []),
        ("LORA", BASE, FILES),
        ("base", None, []),
        ("base", BASE, FILES),
        ("lora", BASE, []),
        ("full", None, []),
        ("lora", {"name": "m", "revision": "r"}, FILES),
        ("lora", BASE | {"version": 3}, FILES),
        ("lora", BASE | {"name": ""}, FILES),
        ("lora", BASE | {"revision": None}, FILES),
        ("lora", BASE | {"sha256": "C" * 64}, FILES),
        ("lora", BASE, [FILES[0], FILES[0]]),
        ("lora", BASE, [FILES[0], FILES[0] | {"name": "weights"}]),
        ("lora", BASE, [FILES[0] | {"version": 1}]),
        ("lora", BASE, [{"name": "m", "size": 1}]),
        ("lora", BASE, [FILES[0] | {"name": "../m"}]),
        ("lora", BASE, [FILES[0] | {"name": 7}]),
        ("lora", BASE, [FILES[0] | {"size": -1}]),
        ("lora", BASE, [FILES[0] | {"size": True}]),
        ("lora", BASE, [FILES[0] | {"size": 1.0}]),
        ("lora", BASE, [FILES[0] | {"sha256": A + "\n"}]),
        ("lora", BASE, [FILES[0] | {"sha256": None}]),
    ],
)
def test_content_of_another_form_has_no_hash(kind, base_model, files):
    with pytest.raises(ValueError):
        artifact_hash(kind, base_model, files)


@pytest.mark.parametrize(
    "name",
    [
        "m",
        "model-00001-of-00002.safetensors",
        "a/b/c.json",
        "sp ace.txt",
        "a..b",
        "é",
        "ab:c",
        "x" * 255,
        "日本語" * 28,
    ],
)
def test_file_names_that_any_worker_can_write(name):
    check_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "//host/share",
        "C:/x",
        "c:x",
        "\\\\host\\share",
        "a\\b",
        "..",
        ".",
        "../x",
        "a/../b",
        "a/..",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\x85b",
        "a\u2028b",
        "a\ud800b",
        " a",
        "a ",
        "a/ b",
        "a /b",
        "\u00a0a",
        ".hidden",
        "a/.hidden",
        "dot.",
        "a./b",
        "...",
        "x" * 256,
        "日" * 86,
    ],
)
def test_file_names_that_are_refused(name):
    with pytest.raises(ValueError):
        check_file_name(name)


@given(st.text(max_size=20))
def test_an_accepted_name_stays_below_its_folder(name):
    try:
        check_file_name(name)
    except ValueError:
        return
    parts = name.split("/")
    assert all(part and part not in {".", ".."} for part in parts)
    assert "\\" not in name and "\0" not in name
    name.encode()


def test_a_stream_is_named_by_its_tensors_in_any_order():
    tensors = [("layer.1.weight", "bfloat16", (2, 3), A), ("layer.0.weight", "float32", (4,), B)]
    listed = f'[["layer.0.weight","float32",[4],"{B}"],["layer.1.weight","bfloat16",[2,3],"{A}"]]'
    expected = sha256(listed.encode()).hexdigest()
    assert stream_hash(tensors) == stream_hash(reversed(tensors)) == expected


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("", "float32", (1,), A)],
        [("a", "float32", (1,), A), ("a", "float32", (1,), B)],
        [("a", "float32", (-1,), A)],
        [("a", "float32", (1.0,), A)],
        [("a", "float32", (1,), A.upper())],
    ],
)
def test_a_stream_without_sense_is_refused(tensors):
    with pytest.raises(ValueError):
        stream_hash(tensors)
