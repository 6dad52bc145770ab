"""Hessian-vector products of HF language models."""
