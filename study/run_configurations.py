"""The run.json of every run of a study, in the layout that the hardware at hand takes."""

from collections.abc import Mapping
from pathlib import Path

from study.settings import Study
from train.command import UserError
from train.config import RunConfig, dump_run, load_run
from train.frozen import fingerprint
from train.run_directory import RunDirectory, write_json

LAYOUT = ("parallel", "zero", "recompute", "micro_batch_size")  # fields of run.json that hardware decides


def write_run_configurations(directory: Path, study: Study, layouts: Mapping[str, RunConfig] | None = None) -> None:
    """Write RUN/run.json of every run; UserError where a name already belongs to another configuration.

    `layouts` are the runs by name as they fit the hardware at hand. Of a run that is there already only the layout is
    replaced: a run can be resumed at another one.
    """
    wanted = {run.name: (layouts or {}).get(run.name, run) for run in study.trained}
    changed: dict[Path, RunConfig] = {}
    for run in study.trained:
        path = RunDirectory(directory / run.name).run_json
        present = load_run(path) if path.exists() else None
        if present and fingerprint(present) != fingerprint(run):
            raise UserError(
                f"{path} holds another configuration than recipe {study.name}; a run's name is used once: choose "
                f"another --root, or move {path.parent} away to train it again"
            )
        new = wanted[run.name]
        if present and layouts:
            new = present.model_copy(update={field: getattr(new, field) for field in LAYOUT})
        if present is None or (layouts and new != present):
            changed[path] = new
    for path, run in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dump_run(run))
