"""A ledger to be verified, made over the API."""

from tests.api.conftest import api, ledger

__all__ = ["api", "ledger"]
