"""Quantizers of other projects, each in its own process: their imports patch others.

bitsandbytes does not, and runs where the model is.
"""

import logging

# as bitsandbytes is imported it warns that a kernel it could fetch from the hub is not there
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
