"""The rules of rollout lifecycle and policy freshness as pure functions.

Nothing here does I/O or knows of a database. Server, client and worker agent share these decisions, so that a
trainer can try a rule on its own data and get the verdict that the server would give. The four functions
below take plain Python values; the column kernels that they stand on live in the modules beside this one.
"""

from coordinator.rules.activation import activate_policy_version
from coordinator.rules.freshness import assess_policy_compatibility
from coordinator.rules.lifecycle import LIFECYCLE_TRANSITIONS, transition_lifecycle
from coordinator.rules.reservation import compare_and_reserve

__all__ = [
    "LIFECYCLE_TRANSITIONS",
    "activate_policy_version",
    "assess_policy_compatibility",
    "compare_and_reserve",
    "transition_lifecycle",
]
