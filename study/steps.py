"""A study as steps: commands, each with what it reads and the files it leaves.

Measuring is cut as fine as it can be: a step is one model and, of quantization, one spec. Steps
that differ in that alone may share a process (`study.step.batches`), as many as suits the
machine: what counts as done does not change. The steps of each kind of measurement are made in
`study.measurements`.
"""

from pathlib import Path

from base.frozen import fingerprint
from study.axes import AnyRun
from study.definition import KINDS, Study
from study.measurements.kind import Subject, Subjects, Text
from study.paths import (
    MIRROR_JSON,
    REPORT,
    MeasuredModel,
    checkpoint_directory,
    hf_directory,
    model_record,
    released_model,
)
from study.released import ReleasedRun
from study.step import Step, python
from study.text.steps import prefix, record, text_steps, used
from train.run.config import RunConfig
from train.run.directory import CHECKPOINT_JSON, RunDirectory

MEASURED = tuple(kind.name for kind, _ in KINDS)
FINAL = ("collect", "report", "mirror")  # kinds of the last steps, whose work a refresh does before
ONLINE = {"download", "prepare", *(kind.name for kind, _ in KINDS if kind.online)}
MADE = ("download", "train", "average")  # besides the measurements read by `collect`
MAKING = ("export", "average")  # kinds of steps that make models out of what is there


def steps_of(study: Study) -> list[Step]:
    """Return all steps of a study, each after the ones it depends on.

    Training comes before measuring: it is wider.
    """
    steps = text_steps(study)
    makers = {output: step.name for step in steps for output in step.outputs}
    texts = {
        use: Text(prefix(study, use), record(study, use), makers.get(record(study, use)))
        for use in used(study)
    }
    roots_first = sorted(study.trained, key=lambda run: run.branch_from is not None)
    steps += [_train_step(study, run, texts) for run in roots_first]
    # Those of all stages first: a soup may be of several.
    released = [run for run in study.runs if isinstance(run, ReleasedRun)]
    steps += [
        _making_step(run, released_model(revision)) for run in released for revision in run.fetched
    ]
    subjects: dict[tuple[str, MeasuredModel], Subject] = {}
    for run in study.runs:
        of_run = _subjects(study, run, texts)
        steps += _run_steps(study, run, of_run)
        subjects |= {(run.name, subject.model): subject for subject in of_run}
    steps += _steps_of_several(study, subjects)
    return [*steps, *_last_steps(study, steps)]


def _checkpoint_json(run: RunConfig, model: MeasuredModel) -> str:
    return str(checkpoint_directory(run.name, model) / CHECKPOINT_JSON)


def _train_step(study: Study, run: RunConfig, texts: dict[str, Text]) -> Step:
    read = (texts["train"], texts["held_out"])
    after = tuple(text.made_by for text in read if text.made_by)
    reads, first = tuple(text.record for text in read), 0
    if run.branch_from:
        parent, first = study.parent_of(run), run.branch_from.step
        after = (*after, f"train-{parent.name}")
        reads = (*reads, _checkpoint_json(parent, MeasuredModel(first)))
    # Soups are made of exports later; training leaves weights and the averages it keeps.
    kept = [model for model in study.models_of(run) if not model.members]
    return Step(
        f"train-{run.name}",
        "train",
        ("{launch}", "-m", "train", "run", f"{{study}}/{run.name}", "--device", "{device}"),
        tuple(_checkpoint_json(run, model) for model in kept),
        after,
        reads,
        run=run.name,
        settings=fingerprint(run),
        slots=study.ranks,
        resumes=True,
        expected_seconds=2 + run.passed_tokens(first, run.total_steps) / 16_000,
    )


def _subjects(study: Study, run: AnyRun, texts: dict[str, Text]) -> list[Subject]:
    """Return the measured models of a run, each with the step that makes it."""
    subjects, moves = list[Subject](), study.moves(run)
    for model in study.models_of(run):
        before = moves.get(model)
        subject_before = None
        if before:
            # Of a branch or a stage the checkpoint before the first is the parent's.
            parent, weights = before
            subject_before = Subject(parent.name, weights, _making_step(parent, weights), texts)
        subjects.append(Subject(run.name, model, _making_step(run, model), texts, subject_before))
    return subjects


def _run_steps(study: Study, run: AnyRun, subjects: list[Subject]) -> list[Step]:
    """Return the steps that make a run's models, then those that measure them, kind by kind."""
    # averages are made of exports, or of downloads, which come first
    steps_by_kind = {
        kind: [subject.making for subject in subjects if subject.making.kind == kind]
        for kind in MAKING
    }
    measured = study.measured(run)
    for kind, settings in study.measurements:
        steps_by_kind[kind.name] = made = []
        for subject in subjects:
            if (kind, settings) in measured[subject.model]:
                made += kind.steps(settings, subject, steps_by_kind)
    return [step for steps in steps_by_kind.values() for step in steps]


def _steps_of_several(study: Study, subjects: Subjects) -> list[Step]:
    """Return the steps that measure several models at once, each after those that make them."""
    return [
        step for kind, settings in study.measurements for step in kind.together(settings, subjects)
    ]


def _making_step(run: AnyRun, model: MeasuredModel) -> Step:
    """Return the step that makes a model's HF directory: a download, an export or an average."""
    # The directory tells weights, averages and soups of one step apart.
    name = f"{run.name}-{hf_directory(run.name, model).name}"
    outputs = (model_record(run.name, model),)
    into = f"{{study}}/{RunDirectory(Path(run.name)).hf}"

    # a mean of exports or of released revisions
    if model.members:
        places = (hf_directory(run.name, model), *model.members)
        made_by = "download" if isinstance(run, ReleasedRun) else "export"
        members = [Path(member).parts for member in model.members]  # RUN/hf/MODEL
        weighing = ("--decay", model.decay) if model.decay else ()
        return Step(
            f"average-{name}",
            "average",
            python("ckpt_tools", "average", *(f"{{study}}/{directory}" for directory in places))
            + weighing,
            outputs,
            tuple(f"{made_by}-{whose}-{member}" for whose, _, member in members),
            run=run.name,
            resumes=True,
        )

    # a released revision
    if isinstance(run, ReleasedRun):
        return Step(
            f"download-{name}",
            "download",
            python("ckpt_tools", "download", run.source, into)
            + (("--family", run.family) if run.family else ()),
            outputs,
            run=run.name,
            models=("--revision", str(model.revision)),
            resumes=True,
        )

    # a checkpoint, or an average that training kept
    return Step(
        f"export-{name}",
        "export",
        python("ckpt_tools", "export"),
        outputs,
        (f"train-{run.name}",),
        (_checkpoint_json(run, model),),
        run=run.name,
        models=(f"{{study}}/{checkpoint_directory(run.name, model)}",),
        tail=("--into", into),
        resumes=True,
        expected_seconds=0.5,
    )


def refresh_command(study: Study) -> tuple[str, ...]:
    """Return the command of the live view."""
    return python("study", "refresh", study.name, "--root", "{root}")


def _last_steps(study: Study, steps: list[Step]) -> list[Step]:
    """Return table, report and MLflow, which any change of the study makes anew.

    They are made of what there is: of a run that diverged some checkpoints never come.
    """
    tabled = {kind.name for kind, settings in study.measurements if kind.columns(settings)}

    def of_kinds(*kinds: str) -> tuple[str, ...]:
        return tuple(step.name for step in steps if step.kind in kinds)

    def last(kind: str, output: str, after: tuple[str, ...], seconds: float) -> Step:
        command = python("study", kind, study.name, "--root", "{root}")
        settings = fingerprint(study)
        return Step(
            kind,
            kind,
            command,
            (output,),
            after,
            settings=settings,
            tolerant=True,
            expected_seconds=seconds,
        )

    return [
        last("collect", "table.parquet", of_kinds(*MADE, *tabled), 1.5),
        last("report", REPORT, ("collect", *of_kinds(*MEASURED)), 20.0),
        last("mirror", MIRROR_JSON, ("collect", "report"), 4.0),
    ]
