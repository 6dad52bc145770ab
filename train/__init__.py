"""The run configuration, data, schedules, one training loop and its engines.

Light modules need no engine and may be imported from every folder: `command`, `config`, `data`, `families`,
`frozen`, `prepare`, `run_directory`, `schedules`, `settings`, `tracking`,
and, with torch, `initialization` and `layout`. The rest stays in `train/`.
"""
