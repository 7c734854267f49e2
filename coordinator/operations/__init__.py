"""What keeps the service running: access, clocks, journal, health."""
