"""The sync client from the async one, `coordinator/client/aio`. `python tests/client/generate.py` writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "coordinator" / "client"
SOURCE = CLIENT / "aio"
# The package's text and the part that is written by hand for each of the two are not translated.
NAMES = sorted(path.name for path in SOURCE.glob("*.py") if path.name not in ("__init__.py", "pace.py"))

# Applied in this order, in code and in text alike.
WORDS = [
    (r"\basync (?=def|with|for)\b", ""),
    (r"\bawait ", ""),
    (r"\bAwaitable\[([\w.]+)\]", r"\1"),
    (r"\bAwaitable, ", ""),  # its import
    (r"\bAsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsync(?=[A-Z])", ""),  # AsyncRun, AsyncIterator, httpx.AsyncClient
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\ba(close|read|iter_bytes)\(", r"\1("),  # httpx
    (r"\banext\(", "next("),
    (r"\baclosing\b", "closing"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bcoordinator\.client\.aio\b", "coordinator.client"),
    (r"\bA background task\b", "A background thread"),
    (r"\bseveral(\s+)tasks\b", r"several\1threads"),
]
# The imports in their new order, and `yield from` again where an async generator has none.
SORT = ("check", "--quiet", "--fix", "--unsafe-fixes", "--select", "I,UP028")


def translated(name: str) -> str:
    """The sync file that comes from `SOURCE / name`, formatted."""
    text = (SOURCE / name).read_text(encoding="utf-8")
    text = re.sub(r'"""(.*?)"""', _without_event_loop, text, flags=re.DOTALL)
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    left = re.search(r"\b\w*(async|await|aio\b|event loop)\w*", text, re.IGNORECASE)
    if left:
        raise ValueError(f"{SOURCE / name}: no rule for {left[0]!r}: add one, or put it into both pace.py")
    head = f"# Generated from coordinator/client/aio/{name}: change that, then run: python tests/client/generate.py\n"
    return _ruff(name, _ruff(name, head + text, *SORT), "format")


def _without_event_loop(docstring: re.Match[str]) -> str:
    """A docstring without its paragraphs on the event loop."""
    kept = [paragraph for paragraph in docstring[1].split("\n\n") if "event loop" not in paragraph]
    end = re.search(r"\s*\Z", docstring[1])
    return '"""' + "\n\n".join(kept).rstrip() + (end[0] if end else "") + '"""'


def _ruff(name: str, text: str, *command: str) -> str:
    arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(CLIENT / name), "-"]
    return subprocess.run(arguments, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    for name in NAMES:
        (CLIENT / name).write_text(translated(name), encoding="utf-8")
