"""Acceptance on GPUs: what this project says of one, measured within 10 minutes, and of several.
`make test-gpu` and `make test-gpus` run it.

Every check is a row of `checks`: a function of a `Workbench` that returns figures. All inputs are
made here: random weights, random tokens. `tests/rehearsal` runs every check on a CPU in small, so
that on a GPU nothing fails by a typo.
"""
