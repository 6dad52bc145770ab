"""Sharded checkpoints to HF directories and back: exact, verified, with lineage."""

import base  # noqa: F401  first: it words what goes wrong in slow imports
