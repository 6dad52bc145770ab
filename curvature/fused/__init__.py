"""Layers of dual numbers in few passes, with their derivatives written out."""
