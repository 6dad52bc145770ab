"""The steps of a study as SLURM jobs."""
