"""The scripts of `make venv`. They need no package that is not in Python itself."""
