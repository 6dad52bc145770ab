"""Memory, time and disk of runs before they start."""
