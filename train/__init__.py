"""The run configuration, data, schedules, one training loop and its engines.

Light modules (`command`, `config`, `data`, `run_directory`, `schedules`, `tracking`) need neither an engine nor torch
and may be imported from every folder; the rest stays inside `train/`.
"""
