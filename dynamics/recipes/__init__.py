"""The recipes of arXiv 2510.06213, and of released models at their revisions."""
