"""The contract of the API at its last release. `python tests/openapi/release.py` makes this one the last."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.openapi.compatibility import contract

RELEASED = Path(__file__).parent / "released.json"
OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"

if __name__ == "__main__":
    document = contract(json.loads(OPENAPI.read_text(encoding="utf-8")))
    RELEASED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
