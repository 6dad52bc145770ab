"""Sharded checkpoints to HF directories and back: exact, verified, with lineage."""
