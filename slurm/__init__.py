"""The steps of a study as SLURM jobs."""

import base  # noqa: F401  first: it words what goes wrong in slow imports
