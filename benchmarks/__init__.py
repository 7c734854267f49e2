"""How fast the coordinator takes rollouts in and hands them out: `python -m benchmarks.ledger`."""
