"""`python -m tests.collected TEST...`: a server of forks that have imported these tests.

Tests are imported once, with pytest's asserts, instead of once for each worker: 7 s. File 3 is
where it is asked for forks.
"""

import socket
import sys

import pytest

from tests.interpreter import real_interpreter, serve

if __name__ == "__main__":
    sys.executable = real_interpreter()  # as the workers have it
    pytest.main(["--collect-only", "--quiet", *sys.argv[1:]])
    sys.stdout.flush()  # or every fork would print it, into what execnet reads
    serve(socket.socket(fileno=3))
