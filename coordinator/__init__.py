"""A neutral server for online RL post-training: rollout lifecycle and policy freshness on Postgres."""
