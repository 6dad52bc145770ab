"""The run configuration, data, schedules, one training loop and its engines.

Light modules need no engine and may be imported from every folder; tests/test_imports.py lists them
and holds them to it. The rest stays in `train/`.
"""

import base  # noqa: F401  first: it words what goes wrong in slow imports
