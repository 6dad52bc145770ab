"""Quantizers and what they cost: losses before and after, paired over documents."""
