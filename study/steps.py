"""A study as steps: commands, each with what it reads and the files it leaves behind.

Measuring is cut as fine as it can be: a step is one model and, of quantization, one spec. Steps that differ in that
alone may share a process (`commands.batches`), as many as suits the machine: what counts as done does not change.
"""

from pathlib import Path

from quant_eval.methods import METHODS
from quant_eval.specs import parse_spec
from study.commands import Step
from study.layout import (
    CURVATURE_SPEC,
    blocks_result,
    checkpoint_directory,
    curvature_result,
    hf_directory,
    last_model,
    model_record,
    quantization_result,
    slice_result,
    step_result,
)
from study.released import ReleasedRun
from study.settings import CurvatureSettings, MeasuredModel, Study
from study.text_steps import prefix, record, text_steps
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import CHECKPOINT_JSON, RunDirectory

# The steps of a run in the order in which they start: long ones first, so that the last run leaves no core idle.
MEASURING = ("download", "export", "average", "quantize", "blocks", "methods", "curvature", "step", "slice")
COLLECTED = ("download", "train", "average", "quantize", "methods", "curvature", "step")
REPORTED = ("quantize", "methods", "curvature", "blocks", "step", "slice")  # read by the report: more than numbers
INTERVAL_LEVEL = 0.95  # coverage of all intervals


def _python(*arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", *arguments)


def _texts(study: Study, *uses: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the steps that make these token files, and the files that vouch for them."""
    records = tuple(dict.fromkeys(record(study, use) for use in uses))
    made = tuple(step.name for step in text_steps(study) if set(step.outputs) & set(records))
    return made, records


def _checkpoint_json(run: RunConfig, model: MeasuredModel) -> str:
    return str(checkpoint_directory(run.name, model) / CHECKPOINT_JSON)


def _train_step(study: Study, run: RunConfig) -> Step:
    after, reads = _texts(study, "train", "held_out")
    first = 0
    if run.branch_from:
        parent, first = study.parent_of(run), run.branch_from.step
        after = (*after, f"train-{parent.name}")
        reads = (*reads, _checkpoint_json(parent, MeasuredModel(first)))
    kept = [model for model in study.models_of(run) if not model.soup_of]
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
        expected_seconds=15 + (run.total_steps - first) * run.tokens_per_step / 25_000,
    )


def _hf(run: RunConfig | ReleasedRun, model: MeasuredModel) -> str:
    return f"{{study}}/{hf_directory(run.name, model)}"


def _making_steps(study: Study, run: RunConfig | ReleasedRun) -> dict[MeasuredModel, Step]:
    """For every model of the run the step that makes its HF directory: a download, an export or an average."""
    models, into = study.models_of(run), f"{{study}}/{RunDirectory(Path(run.name)).hf}"
    steps: dict[MeasuredModel, Step] = {}
    for model in models:
        name, outputs = f"{run.name}-{hf_directory(run.name, model).name}", (model_record(run.name, model),)
        if isinstance(run, ReleasedRun):
            head = _python("ckpt_tools", "download", run.source, into)
            head += ("--family", run.family) if run.family else ()
            chosen = ("--revision", str(model.revision))
            steps[model] = Step(
                f"download-{name}", "download", head, outputs, run=run.name, models=chosen, resumes=True
            )
        elif model.soup_of:
            members = [MeasuredModel(step) for step in model.soup_of]
            command = _python("ckpt_tools", "average", _hf(run, model), *(_hf(run, member) for member in members))
            exports = tuple(f"export-{run.name}-{hf_directory(run.name, member).name}" for member in members)
            steps[model] = Step(f"average-{name}", "average", command, outputs, exports, run=run.name, resumes=True)
        else:
            steps[model] = Step(
                f"export-{name}",
                "export",
                _python("ckpt_tools", "export"),
                outputs,
                (f"train-{run.name}",),
                (_checkpoint_json(run, model),),
                run=run.name,
                models=(f"{{study}}/{checkpoint_directory(run.name, model)}",),
                tail=("--into", into),
                resumes=True,
                expected_seconds=1.5,
            )
    return steps


def _measuring_steps(study: Study, run: RunConfig | ReleasedRun) -> list[Step]:
    """What makes a run's models, then what measures them."""
    made = _making_steps(study, run)
    steps = list(made.values())
    texts, records = _texts(study, "calibration", "held_out")
    for model, making in made.items():
        name = hf_directory(run.name, model).name
        reads = (*making.outputs, *records)
        for spec in study.quantization.specs:
            head, tail = _quantizing(study, (spec,), study.quantization.eval_tokens)
            steps.append(
                Step(
                    f"quantize-{run.name}-{name}-{spec}",
                    "quantize",
                    head,
                    (quantization_result(run.name, model, spec),),
                    (making.name, *texts),
                    reads,
                    run=run.name,
                    models=(_hf(run, model),),
                    specs=("--spec", spec),
                    tail=tail,
                    expected_seconds=4.0,
                )
            )
    if study.curvature:
        steps += _curvature_steps(study, run, made, study.curvature)
    steps += _end_steps(study, run, made)
    return sorted(steps, key=lambda step: MEASURING.index(step.kind))


def _curvature_steps(
    study: Study, run: RunConfig | ReleasedRun, made: dict[MeasuredModel, Step], settings: CurvatureSettings
) -> list[Step]:
    """Traces and eigenvalue of every model but averages; with warm starts each waits for the one before it."""
    texts, records = _texts(study, "held_out")
    steps: list[Step] = []
    for model in [model for model in made if model.average is None]:
        after, reads, tail = (made[model].name, *texts), (*made[model].outputs, *records), _curving(study, settings)
        if settings.warm_start:
            tail += ("--keep-top-vector",)
        if settings.warm_start and steps:
            before = steps[-1]
            after, reads = (*after, before.name), (*reads, *before.outputs)
            tail += ("--warm-start", f"{{study}}/{Path(before.outputs[0]).parent}")
        steps.append(
            Step(
                f"curvature-{run.name}-{hf_directory(run.name, model).name}",
                "curvature",
                ("{launch}", "-m", "curvature", "run"),
                (curvature_result(run.name, model),),
                after,
                reads,
                run=run.name,
                models=(_hf(run, model),),
                tail=tail,
            )
        )
    return steps


def _end_steps(study: Study, run: RunConfig | ReleasedRun, made: dict[MeasuredModel, Step]) -> list[Step]:
    """What is measured of a run's last checkpoint alone: further methods, and some specs block by block."""
    settings, last, steps = study.quantization, last_model(run), []
    texts, records = _texts(study, "calibration", "held_out")
    after, reads = (made[last].name, *texts), (*made[last].outputs, *records)
    for spec in settings.methods:
        head = _python("quant_eval", "run")  # of several projects, in one process
        tail = _quantizing(study, (spec,), settings.eval_tokens)[1]
        steps.append(
            Step(
                f"methods-{run.name}-{spec}",
                "methods",
                head,
                (quantization_result(run.name, last, spec),),
                after,
                reads,
                run=run.name,
                models=(_hf(run, last),),
                specs=("--spec", spec),
                tail=tail,
                expected_seconds=12.0,
            )
        )
    if settings.by_block and study.curvature:
        results = tuple(blocks_result(run, spec) for spec in settings.by_block)
        head, tail = _quantizing(study, settings.by_block, settings.block_tokens)
        command = (*head, _hf(run, last), *(word for spec in settings.by_block for word in ("--spec", spec)), *tail)
        command += ("--per-block", "--dense")
        for result in results:
            command += ("--out", f"{{study}}/{Path(result).parent}")
        seconds = 5.0 + 6.0 * len(results)
        blocks = Step(
            f"blocks-{run.name}", "blocks", command, results, after, reads, run=run.name, expected_seconds=seconds
        )
        steps += [blocks, *_around_the_end(study, run, study.curvature, made, blocks)]
    return steps


def _around_the_end(
    study: Study,
    run: RunConfig | ReleasedRun,
    settings: CurvatureSettings,
    made: dict[MeasuredModel, Step],
    blocks: Step,
) -> list[Step]:
    """Curvature along the quantization steps of a run's last checkpoint, and the loss on the plane of the first one."""
    specs = study.quantization.by_block
    last = last_model(run)
    before = [model for model in made if model.average is None][-2]
    texts, records = _texts(study, "held_out")
    text = ("--data", prefix(study, "held_out"), "--device", "{device}")
    quantized = [f"{{study}}/{Path(result).parent}" for result in blocks.outputs]
    program = ("{launch}", "-m", "curvature")
    along: tuple[str, ...] = (*program, "step", _hf(run, last), *text, *_products(settings))
    along += ("--microbatches", str(settings.step_microbatches), "--level", f"{INTERVAL_LEVEL:g}")
    for directory in quantized:
        along += ("--quantized", directory)
    plane: tuple[str, ...] = (*program, "slice", _hf(run, last), *text, "--previous", _hf(run, before))
    plane += ("--quantized", quantized[0])
    plane += ("--grid", str(settings.slice_grid), "--sequences", str(settings.slice_sequences))
    results = tuple(step_result(run, spec) for spec in specs)
    after = (made[last].name, blocks.name, *texts)
    reads = (*made[last].outputs, *blocks.outputs, *records)
    both = (made[before].name, *after), (*made[before].outputs, *reads)
    seconds = 5.0 + 3.0 * len(specs)
    name, out = run.name, (slice_result(run, specs[0]),)
    return [
        Step(f"step-{name}", "step", along, results, after, reads, run=name, expected_seconds=seconds),
        Step(f"slice-{name}", "slice", plane, out, *both, run=name, expected_seconds=10),
    ]


def _quantizing(study: Study, specs: tuple[str, ...], tokens: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Head and tail of a quantization; other projects' methods run in one process."""
    settings = study.quantization
    own = all(METHODS[parse_spec(spec).method].library == "quantdyn" for spec in specs)
    head = ("{launch}" if own else "{python}", "-m", "quant_eval", "run")
    tail: tuple[str, ...] = ("--calibration", prefix(study, "calibration"), "--eval", prefix(study, "held_out"))
    tail += ("--calibration-sequences", str(settings.calibration_sequences))
    tail += ("--eval-tokens", str(tokens), "--level", f"{INTERVAL_LEVEL:g}")
    return head, (*tail, "--dtype", settings.dtype, "--device", "{device}")


def _curving(study: Study, settings: CurvatureSettings) -> tuple[str, ...]:
    tail: tuple[str, ...] = ("--spec", CURVATURE_SPEC, "--data", prefix(study, "held_out"))
    tail += ("--pairs", str(settings.pairs), "--norm-pairs", str(settings.norm_pairs))
    tail += ("--companion-pairs", str(settings.companion_pairs))
    if settings.lambda_max:
        tail += ("--fixed-sequences", str(settings.fixed_sequences), "--tolerance", f"{settings.tolerance:g}")
        tail += ("--max-iterations", str(settings.max_iterations))
    else:
        tail += ("--no-lambda-max",)
    tail += ("--dtype", settings.dtype, *_products(settings))
    return (*tail, "--level", f"{INTERVAL_LEVEL:g}", "--device", "{device}")


def _products(settings: CurvatureSettings) -> tuple[str, ...]:
    """Return what a Hessian product is over, and how that of a large model fits."""
    options: tuple[str, ...] = ("--microbatch-sequences", str(settings.microbatch_sequences))
    if settings.sequence_length:
        options += ("--sequence-length", str(settings.sequence_length))
    options += ("--sharding", "{sharding}", "--vectors", settings.vectors)
    return (*options, "--checkpointing") if settings.checkpointing else options


def steps_of(study: Study) -> list[Step]:
    """All steps of a study, each after the ones it depends on. Training comes before measuring: it is wider."""
    steps = text_steps(study)
    steps += [_train_step(study, run) for run in sorted(study.trained, key=lambda run: run.branch_from is not None)]
    for run in study.runs:
        steps += _measuring_steps(study, run)

    def of_kinds(*kinds: str) -> tuple[str, ...]:
        return tuple(step.name for step in steps if step.kind in kinds)

    last = [
        ("collect", ("table.parquet",), of_kinds(*COLLECTED), 3.0),
        ("report", ("report.html",), ("collect", *of_kinds(*REPORTED)), 10.0),
        ("mirror", ("mlflow.json",), ("collect", "report"), 15.0),
    ]
    for kind, outputs, after, seconds in last:
        command = _python("study", kind, study.name, "--root", "{root}")
        settings = fingerprint(study)
        steps.append(Step(kind, kind, command, outputs, after, settings=settings, expected_seconds=seconds))
    return steps
