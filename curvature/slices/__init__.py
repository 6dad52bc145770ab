"""The loss on planes through weights: through three checkpoints, along random directions, and uphill (SAM)."""
