"""The closure experiment: one real update, carried from learner into engine, and what it does to old rollouts."""
