"""The run.json of every run of a study, in the layout that the hardware at hand takes."""

from collections.abc import Mapping
from pathlib import Path

from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from study.definition import Study
from train.run.config import RunConfig, dump_run, load_run
from train.run.directory import RunDirectory

LAYOUT = ("parallel", "zero", "recompute", "micro_batch_size")  # what hardware decides


def write_run_configurations(
    directory: Path, study: Study, layouts: Mapping[str, RunConfig] | None = None
) -> None:
    """Write RUN/run.json of every run; UserError where another configuration has its name.

    `layouts` are the runs by name as they fit the hardware at hand. Of a run that is there already
    only the layout is replaced: a run can be resumed at another one.
    """
    changed: dict[Path, RunConfig] = {}
    for run in study.trained:
        path = RunDirectory(directory / run.name).run_json
        present = load_run(path) if path.exists() else None
        if present and fingerprint(present) != fingerprint(run):
            raise UserError(
                f"{path} holds another configuration than recipe {study.name}; a run's name is used"
                f" once: choose another --root, or move {path.parent} away to train it again"
            )
        new = (layouts or {}).get(run.name, present or run)
        if present:
            new = present.model_copy(update={field: getattr(new, field) for field in LAYOUT})
        if new != present:
            changed[path] = new
    for path, run in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dump_run(run))
