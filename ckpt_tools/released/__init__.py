"""Trajectories of released models: revisions, steps, tokens, learning rates; and their download."""
