"""Tokens: created, listed, revoked. The secret is shown once and only its hash is kept."""
