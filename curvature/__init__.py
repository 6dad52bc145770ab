"""Hessian-vector products, traces and eigenvalues of HF language models, with their errors."""
