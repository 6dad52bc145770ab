"""Hessian-vector products, traces and eigenvalues of HF language models, with their errors."""

import base  # noqa: F401  first: it words what goes wrong in slow imports
