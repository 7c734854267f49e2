"""When a worker is lost: it has been silent for too long, and had not said that it would sleep."""


def lost_after(seconds: str) -> str:
    """The condition on `workers`, with the time of silence as SQL. GREATEST passes over a null."""
    return f"GREATEST(heartbeat_at, asleep_until) <= clock_timestamp() - make_interval(secs => {seconds})"


LOST = lost_after(":lost_after_seconds")
