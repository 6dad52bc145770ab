"""All measurements of a study, read from their results into rows of its table.

A row is the weights after a step, or an average of weights up to there (then `average` names it).
What was not measured, or not yet, is empty: losses of a soup in training, further methods of any
but the last weights, and curvature of averages where the settings leave it out.
"""

from pathlib import Path
from typing import Any, NamedTuple

from base.frozen import fingerprint
from study.axes import AnyRun
from study.definition import Study
from study.paths import MeasuredModel, checkpoint_directory, model_record
from study.released import ReleasedRun
from study.results.table import Row, axis_columns, figure_columns, values_on
from train.planning.flops import training_flops
from train.run.config import RunConfig
from train.run.directory import CHECKPOINT_JSON, RunDirectory, read_checkpoint_record
from train.run.schedules import first_step, learning_rate
from train.run.status import divergence


class Collected(NamedTuple):
    """The table's rows and how much of the study they cover."""

    rows: list[Row]
    num_found: int
    expected: int
    settled: list[Row]  # of each run those before the first that still lacks a result


def collect_rows(directory: Path, study: Study) -> Collected:
    """Return a row per run and measured model that is there, in the order of the study."""
    rows, settled, num_found, expected = [], [], 0, 0
    empty = dict.fromkeys(figure_columns(study))
    factors = {name: values_on(axis) for name, axis in axis_columns(study).items()}
    for run in study.runs:
        is_settled = True
        for model, measured in study.measured(run).items():
            readers = {
                directory / path: reader
                for kind, settings in measured
                for path, reader in kind.results(settings, run.name, model).items()
            }
            # One for the model itself, one for each of its results.
            expected += 1 + len(readers)

            # rows from the first model that still lacks something on may change
            of_model = _model_values(directory, run, model)
            # Once False it stays so: later rows of the run are not settled either.
            is_settled &= of_model is not None and all(path.exists() for path in readers)
            if of_model is None:
                continue

            # Every row has all columns, also those that only other models have.
            values: dict[str, Any] = dict(empty)
            for path, reader in readers.items():
                if path.exists():
                    values |= reader(path)
                    num_found += 1
            num_found += 1

            of_model = {"step": model.step} | of_model
            of_model |= {"study": study.name, "run": run.name}
            of_model |= {"average": model.average, "phase": phase_of(run, model.step)}
            if isinstance(run, RunConfig):
                of_model["training_flops"] = flops_until(study, run, model.step)
            figures = {column: values[column] for column in empty}
            figures |= {name: of_run[run.name] for name, of_run in factors.items()}
            rows.append(Row(**of_model, figures=figures))
            settled += rows[-1:] if is_settled else []
    return Collected(rows, num_found, expected, settled)


def phase_of(run: AnyRun, step: int) -> str:
    """Return warmup, stable or anneal for update `step`; for a released model its stage."""
    if isinstance(run, ReleasedRun):
        return run.stage
    # Weights after an update belong to the phase of that update.
    if step <= run.warmup_steps:
        return "warmup"
    return "anneal" if run.schedule.anneal and step > run.schedule.anneal.start_step else "stable"


def flops_until(study: Study, run: RunConfig, step: int) -> float:
    """Return the training FLOPs that led to the weights after `step`, those of its parent too."""
    first = first_step(run)
    own = training_flops(run, first, step)
    return own + flops_until(study, study.parent_of(run), first) if run.branch_from else own


def _model_values(directory: Path, run: AnyRun, model: MeasuredModel) -> dict[str, Any] | None:
    """Return the columns that training decides; None while there is no such model."""
    is_saved = isinstance(run, RunConfig) and not model.members  # by training itself
    checkpoint = directory / checkpoint_directory(run.name, model)
    record_path = directory / model_record(run.name, model)
    if not (checkpoint / CHECKPOINT_JSON if is_saved else record_path).exists():
        return None
    if isinstance(run, ReleasedRun):
        # An average is at the place of its last member.
        last = model.members[-1].rpartition("/")[2] if model.members else model.revision
        known = dict(run.named(last))
        del known["name"]
        return known | {"peak_lr": run.peak_lr}
    settings = {
        "peak_lr": run.optimizer.peak_lr,
        "weight_decay": run.optimizer.weight_decay,
        "batch_size": run.batch_size,
        "engine": run.engine,
        "seed": run.seed,
    }
    if model.members:  # made of exports: training knows nothing of it
        tokens, rate = run.tokens_at(model.step), learning_rate(run, model.step)
        return settings | {"tokens": tokens, "learning_rate": rate}
    record = read_checkpoint_record(checkpoint)
    return settings | {
        "tokens": record.tokens,
        "learning_rate": record.learning_rate,
        "train_loss": None if model.average else record.train_loss,
        "held_out_loss": record.held_out_loss,
    }


def diverged_runs(directory: Path, study: Study) -> dict[str, str]:
    """Return the runs without an end, in words by name: 'lr1e5 diverged at step 2: ...'.

    A branch of a checkpoint that never came is among them.
    """
    words = {}
    # Parents first: a branch of one that diverged is explained by it.
    for run in sorted(study.trained, key=lambda run: run.branch_from is not None):
        status = divergence(RunDirectory(directory / run.name), fingerprint(run))
        if status:
            words[run.name] = status.words
        elif run.branch_from:
            parent = study.parent_of(run)
            status = divergence(RunDirectory(directory / parent.name), fingerprint(parent))
            # A parent that diverged later still made the checkpoint that the branch starts from.
            if status and status.step <= run.branch_from.step:
                words[run.name] = f"{run.name} cannot start, since {status.words}"
    return {run.name: words[run.name] for run in study.trained if run.name in words}


def left_out_lines(directory: Path, study: Study) -> list[str]:
    """Return a line for every run that diverged, for what is made of the others."""
    return [f"left out: {words}" for words in diverged_runs(directory, study).values()]
