"""Rollouts: arrival, rewards, groups, and every change of state."""
