"""The trajectories of released models: their revisions, steps, tokens and learning rates, listed and fetched."""
