"""Tasks as they are written down."""

import json


def line(**fields: object) -> str:
    """A task of one line; `fields` are added or replaced."""
    return json.dumps({"task_id": "t1", "messages": [{"role": "user", "content": "2+3="}]} | fields)
