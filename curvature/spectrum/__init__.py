"""Eigenvalues and spectral density of the Hessian from products with it, with their errors."""
