"""Rounding of one weight matrix: grids, GPTQ, and the Hessian of its inputs. Settings: `spec`."""
