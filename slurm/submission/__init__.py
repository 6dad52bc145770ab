"""A study as job arrays, and their submission."""
