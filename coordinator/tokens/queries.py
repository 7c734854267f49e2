"""Every statement about tokens, but for the one that authenticates."""

from sqlalchemy import text

_COLUMNS = "token_id, name, role, run_id, worker_id, created_at, expires_at, revoked_at, last_used_at"

INSERT_TOKEN = text(f"""
    INSERT INTO tokens (token_id, name, role, run_id, worker_id, secret_hash, expires_at)
    VALUES (:token_id, :name, :role, :run_id, :worker_id, :secret_hash, :expires_at)
    ON CONFLICT (name) DO NOTHING
    RETURNING {_COLUMNS}
""")

LIST_TOKENS = text(f"SELECT {_COLUMNS} FROM tokens ORDER BY created_at, token_id")

REVOKE_TOKEN = text(f"""
    UPDATE tokens SET revoked_at = COALESCE(revoked_at, clock_timestamp()) WHERE token_id = :token_id
    RETURNING {_COLUMNS}
""")

ENSURE_ADMIN = text("""
    INSERT INTO tokens (token_id, name, role, secret_hash) VALUES (:token_id, :name, 'admin', :secret_hash)
    ON CONFLICT (token_id) DO NOTHING
""")

HAS_TOKENS = text("SELECT EXISTS (SELECT FROM tokens WHERE revoked_at IS NULL)")
"""Whether anyone could sign in at all."""
