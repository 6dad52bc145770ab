"""Checks of a cluster before the first job of a study."""
