"""Watching a run: its journal as it grows, and how one activation went."""
