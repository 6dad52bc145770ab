"""A study: its recipe, its steps, the runner, the collected table, MLflow and the report."""

import base  # noqa: F401  first: it words what goes wrong in slow imports
