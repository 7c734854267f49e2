"""Updates: open, candidates, reserve, renew, commit, abort, lineage."""
