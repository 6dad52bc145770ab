"""Dual numbers: their arithmetic, passes with derivatives written out, and all decoder blocks."""
