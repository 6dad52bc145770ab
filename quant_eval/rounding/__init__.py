"""The algorithms of our quantizers: grids, GPTQ, two precisions, trellis codes."""
