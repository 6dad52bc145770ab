"""A study in MLflow: an importer that mirrors its files, and a follower beside a run."""
