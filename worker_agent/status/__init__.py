"""What a worker says of itself: metrics, health, readiness."""
