"""The example runs as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

from tests.client.server_process import ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_rollout.py"


def test_one_rollout(server: ServerProcess) -> None:
    environment = os.environ | {"COORDINATOR_URL": server.url, "COORDINATOR_TOKEN": server.token}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "history: generated -> rewarded -> reserved -> consumed" in done.stdout
    assert '"outcome": "consumed"' in done.stdout
