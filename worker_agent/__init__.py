"""The worker agent: runs beside the GPU, serves the policy versions it is told to, generates rollouts."""
