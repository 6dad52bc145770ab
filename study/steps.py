"""A study as steps: commands with the files they leave behind, and when one of them need not run again.

Commands name places by {python}, {root} and {study}: the same step on another machine, or after the study was moved,
is the same text and has the same fingerprint.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.hf_directory import LINEAGE_JSON
from study.layout import (
    CORPUS,
    CURVATURE_SPEC,
    MLFLOW_STORE,
    blocks_result,
    checkpoint_directory,
    curvature_result,
    figures_of,
    hf_directory,
    quantization_result,
    slice_result,
    step_result,
)
from study.settings import MeasuredModel, Study
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import CHECKPOINT_JSON, RunDirectory, step_name

CHECKPOINTS_PER_PROCESS = 10  # a process spends some seconds on its imports, as much as one tiny checkpoint takes
# The steps of a run in the order in which they start: long ones first, so that the last run leaves no core idle.
MEASURING = ("export", "average", "quantize", "blocks", "methods", "curvature", "step", "slice")
COMMAND_PROMPT = "$ "  # begins the line that a log shows before each attempt
INTERVAL_LEVEL = 0.95  # coverage of all intervals


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: unique in the study and fit for a file name.
        kind: steps of one kind take about the same time.
        command: arguments with the placeholders {python}, {root} and {study}.
        outputs: files below the study, each written last by the command and holding the hashes of what it vouches for.
        after: names of the steps whose outputs it reads.
        run: the training run it belongs to, if any.
        settings: what decides the outputs besides the command and what it reads, as a fingerprint.
        slots: cores it occupies.
        resumes: it goes on from its own unfinished outputs, which are therefore never removed.
        expected_seconds: a first guess for the ETA, corrected by what steps of its kind took.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()
    run: str = ""
    settings: str = ""
    slots: int = 1
    resumes: bool = False
    expected_seconds: float = 5.0

    def argv(self, directory: Path) -> list[str]:
        """The command for the study at `directory`."""
        return resolve(self.command, directory)


def resolve(command: tuple[str, ...], directory: Path) -> list[str]:
    """Placeholders replaced by absolute paths."""
    study = directory.absolute()
    places = {"{python}": sys.executable, "{root}": str(study.parent), "{study}": str(study)}
    resolved = []
    for argument in command:
        for placeholder, place in places.items():
            if argument == placeholder or argument.startswith(f"{placeholder}/"):
                argument = place + argument.removeprefix(placeholder)
        resolved.append(argument)
    return resolved


def _python(*arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", *arguments)


def _text_steps(study: Study) -> list[Step]:
    corpus = study.corpus
    make = _python("study", "corpus", f"{{study}}/{CORPUS}", "--vocab-size", str(corpus.vocab_size))
    make += ("--held-out-percent", str(corpus.held_out_percent))
    make += ("--held-out-characters", str(corpus.held_out_characters))
    steps = [Step("corpus", "corpus", make, (f"{CORPUS}/corpus.json",), expected_seconds=12)]
    for split in ("train", "held_out"):
        source, tokenizer = f"{{study}}/{CORPUS}/{split}.jsonl", f"{{study}}/{CORPUS}/tokenizer"
        command = _python("train", "prepare", source, "--tokenizer", tokenizer, "--out", f"{{study}}/data/{split}")
        steps.append(Step(f"prepare-{split}", "prepare", command, (f"data/{split}.json",), ("corpus",)))
    return steps


def _train_step(study: Study, run: RunConfig) -> Step:
    torchrun = _python("torch.distributed.run", "--nproc-per-node", str(study.ranks))
    torchrun += ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")  # a free port: studies run side by side
    return Step(
        f"train-{run.name}",
        "train",
        (*torchrun, "-m", "train", "run", f"{{study}}/{run.name}"),
        tuple(
            str(checkpoint_directory(run.name, model) / CHECKPOINT_JSON)
            for model in study.models_of(run)
            if not model.soup_of
        ),
        ("prepare-train", "prepare-held_out"),
        run=run.name,
        settings=fingerprint(run),
        slots=study.ranks,
        resumes=True,
        expected_seconds=15 + run.total_steps * run.tokens_per_step / 25_000,
    )


def _measuring_steps(study: Study, run: RunConfig) -> list[Step]:
    """Export of a run's checkpoints, its soups, then their measurements, some checkpoints to a process.

    An average is quantized by the process that does so with the checkpoint of its step.
    """
    models = study.models_of(run)
    left = [model for model in models if not model.soup_of]
    checkpoints = [f"{{study}}/{checkpoint_directory(run.name, model)}" for model in left]
    export = Step(
        f"export-{run.name}",
        "export",
        _python("ckpt_tools", "export", *checkpoints, "--into", f"{{study}}/{RunDirectory(Path(run.name)).hf}"),
        tuple(str(hf_directory(run.name, model) / LINEAGE_JSON) for model in left),
        (f"train-{run.name}",),
        run.name,
        resumes=True,
        expected_seconds=5 + len(checkpoints),
    )
    texts = ("prepare-train", "prepare-held_out")
    soups = {model: _soup_step(run, model, export.name) for model in models if model.soup_of}
    steps = [export, *soups.values()]
    for start in range(0, len(run.save_steps), CHECKPOINTS_PER_PROCESS):
        chosen = run.save_steps[start : start + CHECKPOINTS_PER_PROCESS]
        quantized = [model for model in models if model.step in chosen]
        curved = [model for model in quantized if model.average is None]
        specs = study.quantization.specs
        results = tuple(quantization_result(run.name, model, spec) for model in quantized for spec in specs)
        curvatures = tuple(curvature_result(run.name, model) for model in curved)
        made = (export.name, *(soups[model].name for model in quantized if model.soup_of))
        for kind, measured, outputs, reads in (
            ("quantize", quantized, results, (*made, *texts)),
            ("curvature", curved, curvatures, (export.name, texts[1])),
        ):
            directories = [f"{{study}}/{hf_directory(run.name, model)}" for model in measured]
            if kind == "quantize":
                command = _quantizing(study, directories, specs, study.quantization.eval_tokens)
            else:
                command = _curving(study, directories)
            name, seconds = f"{kind}-{run.name}-{step_name(chosen[0])}", 5.0 + 5.0 * len(measured)
            steps.append(Step(name, kind, command, outputs, reads, run.name, expected_seconds=seconds))
    steps += _end_steps(study, run, (export.name, *texts))
    return sorted(steps, key=lambda step: MEASURING.index(step.kind))


def _end_steps(study: Study, run: RunConfig, reads: tuple[str, ...]) -> list[Step]:
    """What is measured of a run's last checkpoint alone: further methods, and some specs block by block."""
    settings, last, steps = study.quantization, MeasuredModel(run.total_steps), []
    directories = [f"{{study}}/{hf_directory(run.name, last)}"]
    if settings.methods:
        command = _quantizing(study, directories, settings.methods, settings.eval_tokens)
        results = tuple(quantization_result(run.name, last, spec) for spec in settings.methods)
        seconds = 10.0 + 10.0 * len(settings.methods)
        steps.append(
            Step(f"methods-{run.name}", "methods", command, results, reads, run.name, expected_seconds=seconds)
        )
    if settings.by_block:
        results = tuple(blocks_result(run, spec) for spec in settings.by_block)
        command = _quantizing(study, directories, settings.by_block, settings.block_tokens)
        command += ("--per-block", "--dense")
        for result in results:
            command += ("--out", f"{{study}}/{Path(result).parent}")
        seconds = 5.0 + 6.0 * len(results)
        blocks = Step(f"blocks-{run.name}", "blocks", command, results, reads, run.name, expected_seconds=seconds)
        steps += [blocks, *_around_the_end(study, run, (blocks.name, *reads))]
    return steps


def _around_the_end(study: Study, run: RunConfig, reads: tuple[str, ...]) -> list[Step]:
    """Curvature along the quantization steps of a run's last checkpoint, and the loss on the plane of the first one."""
    settings, specs = study.curvature, study.quantization.by_block
    before, last = (f"{{study}}/{hf_directory(run.name, MeasuredModel(step))}" for step in run.save_steps[-2:])
    text = ("--data", "{study}/data/held_out")
    quantized = [f"{{study}}/{Path(blocks_result(run, spec)).parent}" for spec in specs]
    along = (*_python("curvature", "step", last), *text, "--microbatches", str(settings.step_microbatches))
    along += ("--microbatch-sequences", str(settings.microbatch_sequences), "--level", f"{INTERVAL_LEVEL:g}")
    for directory in quantized:
        along += ("--quantized", directory)
    plane = (*_python("curvature", "slice", last), *text, "--previous", before, "--quantized", quantized[0])
    plane += ("--grid", str(settings.slice_grid), "--sequences", str(settings.slice_sequences))
    results = tuple(step_result(run, spec) for spec in specs)
    seconds = 5.0 + 3.0 * len(specs)
    return [
        Step(f"step-{run.name}", "step", along, results, reads, run.name, expected_seconds=seconds),
        Step(f"slice-{run.name}", "slice", plane, (slice_result(run, specs[0]),), reads, run.name, expected_seconds=10),
    ]


def _soup_step(run: RunConfig, soup: MeasuredModel, export: str) -> Step:
    """The uniform mean of some of the run's exports."""
    out = hf_directory(run.name, soup)
    members = [f"{{study}}/{hf_directory(run.name, MeasuredModel(step))}" for step in soup.soup_of]
    return Step(
        f"average-{run.name}-{out.name}",
        "average",
        _python("ckpt_tools", "average", f"{{study}}/{out}", *members),
        (str(out / LINEAGE_JSON),),
        (export,),
        run.name,
        resumes=True,
    )


def _quantizing(study: Study, models: list[str], specs: tuple[str, ...], tokens: int) -> tuple[str, ...]:
    settings = study.quantization
    command = _python("quant_eval", "run", *models)
    for spec in specs:
        command += ("--spec", spec)
    command += ("--calibration", "{study}/data/train", "--eval", "{study}/data/held_out")
    command += ("--calibration-sequences", str(settings.calibration_sequences))
    return (*command, "--eval-tokens", str(tokens), "--level", f"{INTERVAL_LEVEL:g}")


def _curving(study: Study, models: list[str]) -> tuple[str, ...]:
    settings = study.curvature
    command = _python("curvature", "run", *models, "--spec", CURVATURE_SPEC, "--data", "{study}/data/held_out")
    command += ("--pairs", str(settings.pairs), "--norm-pairs", str(settings.norm_pairs))
    command += ("--companion-pairs", str(settings.companion_pairs))
    command += ("--microbatch-sequences", str(settings.microbatch_sequences))
    command += ("--fixed-sequences", str(settings.fixed_sequences), "--tolerance", f"{settings.tolerance:g}")
    return (*command, "--level", f"{INTERVAL_LEVEL:g}")


def steps_of(study: Study) -> list[Step]:
    """All steps of a study, each after the ones it depends on. Training comes before measuring: it is wider."""
    steps = _text_steps(study)
    steps += [_train_step(study, run) for run in study.runs]
    for run in study.runs:
        steps += _measuring_steps(study, run)

    def of_kinds(*kinds: str) -> tuple[str, ...]:
        return tuple(step.name for step in steps if step.kind in kinds)

    collected = of_kinds("train", "quantize", "methods", "curvature", "step")
    read = of_kinds("quantize", "methods", "curvature", "blocks", "step", "slice")  # by the report: more than numbers
    last = [
        ("collect", ("table.parquet",), collected, 3.0),
        ("report", ("report.html", *figures_of(study).values()), ("collect", *read), 10.0),
        ("mirror", ("mlflow.json", f"../{MLFLOW_STORE}"), ("collect", "report"), 15.0),
    ]
    for kind, outputs, after, seconds in last:
        command = _python("study", kind, study.name, "--root", "{root}")
        settings = fingerprint(study)
        steps.append(Step(kind, kind, command, outputs, after, settings=settings, expected_seconds=seconds))
    return steps


def log_path(directory: Path, step: Step) -> Path:
    """STUDY/logs/STEP.log: everything the step printed, over all attempts."""
    return directory / "logs" / f"{step.name}.log"


def shown(command: tuple[str, ...]) -> str:
    """A command for people and for a shell: plain 'python', and $STUDY for the study's directory."""
    words = []
    for argument in command:
        place, _, rest = argument.partition("}")
        if place in ("{study", "{root"):
            words.append(f'"$STUDY{"/.." if place == "{root" else ""}{rest}"')
        else:
            words.append("python" if argument == "{python}" else shlex.quote(argument))
    return " ".join(words)
