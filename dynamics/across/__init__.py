"""Several studies in one table, with the error over the size of the model."""
