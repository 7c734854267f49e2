"""When a worker is lost: it has been silent for too long, and had not said that it would sleep."""

LOST = """
    GREATEST(heartbeat_at, asleep_until) <= clock_timestamp() - make_interval(secs => :lost_after_seconds)
"""
"""A condition on `workers`; takes `:lost_after_seconds`. GREATEST passes over a null."""
