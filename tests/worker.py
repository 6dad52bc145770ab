"""A function of a test called as a process of its own: `-m tests.worker MODULE FUNCTION WORDS`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    module, function, *words = sys.argv[1:]
    getattr(import_module(module), function)(*words)
