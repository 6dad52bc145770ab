"""A study: its recipe, its steps, the runner, the collected table, MLflow and the report."""
