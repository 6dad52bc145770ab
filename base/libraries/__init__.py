"""Names of libraries that they do not promise, and how one of them is replaced."""
