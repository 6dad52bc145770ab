"""The steps of a study and their local runner."""
