"""Acceptance on one GPU: what this project says of GPUs, measured on one in 15 minutes. `make
test-gpu` runs it.

Every check is a function of a `Workbench` that returns figures. All inputs are made here: random
weights, random tokens. `tests/rehearsal/test_gpu_acceptance.py` runs every check on a CPU in small,
so that on a GPU nothing fails by a typo.
"""
