"""Quantizers of other projects, each in a process of its own: their imports patch what is around them."""
