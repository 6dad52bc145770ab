"""The steps of a study as SLURM jobs. Nothing here yet."""
