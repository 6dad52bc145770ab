"""Models: their configuration, parameters and initial weights."""
