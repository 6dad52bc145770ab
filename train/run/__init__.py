"""A run: its configuration, its directory and what it records there."""
