"""Where the coordinator keeps what it acknowledged: the database, its owner, and the artifacts."""
