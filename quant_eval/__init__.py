"""The cost of quantizing a checkpoint: own RTN and GPTQ, others' methods, paired losses."""

import base  # noqa: F401  first: it words what goes wrong in slow imports
