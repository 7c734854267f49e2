"""A ledger to be verified, made over the API."""

from tests.api.conftest import api, ledger, whole_document

__all__ = ["api", "ledger", "whole_document"]
