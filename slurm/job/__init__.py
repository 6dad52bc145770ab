"""One element of a job array at work."""
