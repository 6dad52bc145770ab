"""Text to token files, and token files to batches."""
