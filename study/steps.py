"""A study as steps: commands with the files they leave behind, and when one of them need not run again.

Commands name places by {python}, {root} and {study}: the same step on another machine, or after the study was moved,
is the same text and has the same fingerprint.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.hf_directory import LINEAGE_JSON, RESULT_JSON, result_directory
from study.settings import MeasuredModel, Study
from train.config import RunConfig
from train.frozen import fingerprint
from train.run_directory import CHECKPOINT_JSON, RunDirectory, step_name

MLFLOW_STORE = "mlflow.db"
CURVATURE_SPEC = "hutchinson"
FIGURES = (
    *("quantization_error", "kl_divergence", "validation_loss", "averages", "methods", "blocks"),
    *("full_against_quantized", "curvature"),
)
CORPUS = "data/corpus"
CHECKPOINTS_PER_PROCESS = 5  # a process spends some seconds on its imports, as much as one tiny checkpoint takes
COMMAND_PROMPT = "$ "  # begins the line that a log shows before each attempt
INTERVAL_LEVEL = 0.95  # coverage of the intervals of quantization errors


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


def checkpoint_directory(run: str, model: MeasuredModel) -> Path:
    """Below the study, where training leaves the model; it leaves no soups."""
    directory = RunDirectory(Path(run))
    if model.average:
        return directory.average_checkpoint(model.average, model.step)
    return directory.checkpoint(model.step)


def hf_directory(run: str, model: MeasuredModel) -> Path:
    """Below the study, where the model lies as it is measured."""
    directory = RunDirectory(Path(run))
    name = directory.average_name(model.average, model.step) if model.average else step_name(model.step)
    return directory.hf / name


def quantization_result(run: str, model: MeasuredModel, spec: str) -> str:
    """Path below the study of the result of one quantization."""
    return str(result_directory(hf_directory(run, model), "quant", spec) / RESULT_JSON)


def curvature_result(run: str, model: MeasuredModel) -> str:
    """Path below the study of the result of the curvature measurement."""
    return str(result_directory(hf_directory(run, model), "curvature", CURVATURE_SPEC) / RESULT_JSON)


def blocks_result(run: RunConfig, spec: str) -> str:
    """Path below the study of the result of the last checkpoint block by block: STUDY/RUN/hf/STEP/blocks/SPEC.

    Not below quant/, where the same spec has its result as at every other checkpoint.
    """
    return str(hf_directory(run.name, MeasuredModel(run.total_steps)) / "blocks" / spec / RESULT_JSON)


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
            command = _quantizing(study, directories, specs) if kind == "quantize" else _curving(study, directories)
            name, seconds = f"{kind}-{run.name}-{step_name(chosen[0])}", 5.0 + 5.0 * len(measured)
            steps.append(Step(name, kind, command, outputs, reads, run.name, expected_seconds=seconds))
    return steps + _end_steps(study, run, (export.name, *texts))


def _end_steps(study: Study, run: RunConfig, reads: tuple[str, ...]) -> list[Step]:
    """What is measured of a run's last checkpoint alone: further methods, and the first spec block by block."""
    settings, last, steps = study.quantization, MeasuredModel(run.total_steps), []
    directories = [f"{{study}}/{hf_directory(run.name, last)}"]
    if settings.methods:
        command = _quantizing(study, directories, settings.methods)
        results = tuple(quantization_result(run.name, last, spec) for spec in settings.methods)
        seconds = 10.0 + 10.0 * len(settings.methods)
        steps.append(
            Step(f"methods-{run.name}", "methods", command, results, reads, run.name, expected_seconds=seconds)
        )
    if settings.per_block:
        spec = settings.specs[0]
        result = blocks_result(run, spec)
        command = _quantizing(study, directories, (spec,))
        command += ("--per-block", "--out", f"{{study}}/{Path(result).parent}")
        steps.append(Step(f"blocks-{run.name}", "blocks", command, (result,), reads, run.name, expected_seconds=15.0))
    return steps


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


def _quantizing(study: Study, models: list[str], specs: tuple[str, ...]) -> tuple[str, ...]:
    settings = study.quantization
    command = _python("quant_eval", "run", *models)
    for spec in specs:
        command += ("--spec", spec)
    command += ("--calibration", "{study}/data/train", "--eval", "{study}/data/held_out")
    command += ("--calibration-sequences", str(settings.calibration_sequences))
    return (*command, "--eval-tokens", str(settings.eval_tokens), "--level", f"{INTERVAL_LEVEL:g}")


def _curving(study: Study, models: list[str]) -> tuple[str, ...]:
    settings = study.curvature
    command = _python("curvature", "run", *models, "--spec", CURVATURE_SPEC, "--data", "{study}/data/held_out")
    command += ("--pairs", str(settings.pairs), "--microbatch-sequences", str(settings.microbatch_sequences))
    return (*command, "--eigen-sequences", str(settings.eigen_sequences), "--tolerance", f"{settings.tolerance:g}")


def steps_of(study: Study) -> list[Step]:
    """All steps of a study, each after the ones it depends on. Training comes before measuring: it is wider."""
    steps = _text_steps(study)
    steps += [_train_step(study, run) for run in study.runs]
    for run in study.runs:
        steps += _measuring_steps(study, run)

    def of_kinds(*kinds: str) -> tuple[str, ...]:
        return tuple(step.name for step in steps if step.kind in kinds)

    compared = of_kinds("quantize", "methods", "blocks")  # the report reads their losses document by document
    last = [
        ("collect", ("table.parquet",), of_kinds("train", "quantize", "methods", "curvature"), 3.0),
        ("report", ("report.html", *figures_of(study).values()), ("collect", *compared), 10.0),
        ("mirror", ("mlflow.json", f"../{MLFLOW_STORE}"), ("collect", "report"), 15.0),
    ]
    for kind, outputs, after, seconds in last:
        command = _python("study", kind, study.name, "--root", "{root}")
        settings = fingerprint(study)
        steps.append(Step(kind, kind, command, outputs, after, settings=settings, expected_seconds=seconds))
    return steps


def figures_of(study: Study) -> dict[str, str]:
    """Name -> path below the study of every figure that it has something to show in, in the order of the report."""
    settings = study.quantization
    without = {"methods": not settings.methods, "blocks": not settings.per_block}
    return {name: f"figures/{name}.png" for name in FIGURES if not without.get(name)}


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
