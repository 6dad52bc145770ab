"""Libraries: versions that were tested together, and names that they do not promise."""
