"""Rounding of the linears of a model: rows over ranks, two precisions, and trellis codes."""
