"""A study in MLflow: an importer that mirrors its files, a follower beside a run, and the way back to a table."""
