"""The text of a study, and the commands that make it."""
