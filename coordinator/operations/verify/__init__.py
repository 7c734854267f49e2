"""Proves the coordinator's promises from the audit of its database, or says what contradicts them.

Everything is read in one snapshot and judged by statements of its own, by none that the server writes with:

1. a rollout's revisions run without holes, each from where the last one led, by an allowed transition, and its
   row or tombstone stands where its audit ends;
2. a rollout is consumed at most once at a time, each commit follows a reserve by the same update, and only a rewind
   takes a rollout out of a commit;
3. commits are numbered without holes and form a tree, of which the surviving line is one path; it consumes each
   rollout at most once and splits no group; each commit lies within its lease;
4. what was acknowledged is there, as a row or as a tombstone, and what may still be trained on has its tokens;
5. every reserve kept the limits on lag and drift, under one contract for each update;
6. the pointer only grows, each switch after the artifact's commit and every required worker's matching ack;
7. every action span was vouched for by an earlier ack of its incarnation, or the rollout is kept out.

One file for each statement: `revisions`, `consumption`, `line`, `acknowledgement`, `limits`, `pointer`, `vouching`.
"""

from coordinator.operations.verify.findings import Acknowledged, Breach, Verdict
from coordinator.operations.verify.proof import RunUnknownError, snapshot, verify

__all__ = ["Acknowledged", "Breach", "RunUnknownError", "Verdict", "snapshot", "verify"]
