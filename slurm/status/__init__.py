"""The state of a submitted study."""
