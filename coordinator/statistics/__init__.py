"""Statistics of a run over a window of time."""
