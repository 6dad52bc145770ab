"""The results of a study as a table, and comparisons between them."""
