"""The sync client is what its source, the async client, gives."""

import pytest

from tests.client.generate import CLIENT, NAMES, translated


@pytest.mark.parametrize("name", NAMES)
def test_the_sync_client_is_up_to_date(name: str) -> None:
    assert (CLIENT / name).read_text(encoding="utf-8") == translated(name), "run: python tests/client/generate.py"
