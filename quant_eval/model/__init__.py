"""HF models, one decoder block in memory at a time."""
