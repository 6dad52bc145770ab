"""The run configuration, data, schedules, one training loop and its engines.

Light modules need no engine and may be imported from every folder: `command`, `config`, `data`, `prepare`,
`run_directory`, `schedules`, `tracking`, and, with torch, `initialization` and `layout`. The rest stays in `train/`.
"""
