"""The ways back: a rewind of the line of commits, a rollback of the policy, the withdrawal of a version."""
