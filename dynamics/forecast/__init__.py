"""The error after a cooldown, forecast from the stable phase, and how well that has worked."""
