"""Runs: one experiment, one line of policy versions, one admission rule."""
