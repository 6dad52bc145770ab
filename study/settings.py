"""What a study is: its runs and what is measured of them, resolved. The content of study.json."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from quant_eval.specs import parse_spec
from train.command import UserError, explain_validation
from train.config import RunConfig, dump_run, load_run
from train.frozen import NAME_PATTERN, Frozen
from train.run_directory import RunDirectory, write_json

ORDERS = {"actorder": "activation order", "groupaware": "group-aware order"}


class CorpusSettings(Frozen):
    """The text of the running interpreter's standard library and the tokenizer trained on it."""

    vocab_size: int = Field(gt=256, description="tokens of the byte-level BPE, end-of-text and 256 bytes included")
    held_out_percent: int = Field(gt=0, lt=100, description="share of the files kept for measuring")
    held_out_characters: int = Field(gt=0, description="kept of each held-out file")


class QuantizationSettings(Frozen):
    """What every checkpoint is quantized with, calibrated on and evaluated on."""

    specs: tuple[str, ...] = Field(min_length=1)
    methods: tuple[str, ...] = Field(default=(), description="further specs, for the last checkpoint of each run only")
    by_block: tuple[str, ...] = Field(
        default=(),
        description="specs measured block by block at the last checkpoint of each run, with the curvature along their "
        "steps; the first spans the slices",
    )
    calibration_sequences: int = Field(ge=1)
    eval_tokens: int = Field(ge=1, description="predicted tokens behind each loss")
    block_tokens: int = Field(ge=1, description="the same block by block: with B blocks 2 B + 1 losses are measured")

    @property
    def at_the_end(self) -> tuple[str, ...]:
        """Every spec that the last checkpoint of a run is quantized with."""
        return (*self.specs, *self.methods)

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        # A spec names a directory and a column, so it must be written in its one canonical form.
        for spec in (*self.at_the_end, *self.by_block):
            canonical = parse_spec(spec).name
            if spec != canonical:
                raise ValueError(f"write {canonical} instead of {spec}")
        if any(len(set(specs)) != len(specs) for specs in (self.at_the_end, self.by_block)):
            raise ValueError("a spec is listed twice")
        for spec in self.by_block:
            if parse_spec(spec).method == "int8":
                raise ValueError(f"{spec} rounds activations too, it is no step of weights; leave it out of by_block")
        return self


class CurvatureSettings(Frozen):
    """Hessian of the held-out loss at every checkpoint: traces from pairs, top eigenvalue by Lanczos.

    At the last checkpoint of each run also along the steps of `QuantizationSettings.by_block`, and the loss on a plane.
    """

    pairs: int = Field(ge=2, description="(probe, microbatch) pairs behind the trace")
    norm_pairs: int = Field(ge=2, description="pairs whose probes are restricted to the norms")
    companion_pairs: int = Field(ge=2, description="microbatches of the Gauss-Newton and Fisher traces")
    microbatch_sequences: int = Field(ge=1)
    fixed_sequences: int = Field(ge=1, description="sequences of the fixed batch of the eigenvalue")
    tolerance: float = Field(gt=0, description="relative residual that counts as converged")
    step_microbatches: int = Field(ge=2, description="behind every figure of a quantization step")
    slice_grid: int = Field(ge=3, description="points along either axis of a slice")
    slice_sequences: int = Field(ge=2, description="sequences that every loss of a slice is over")


class SoupSettings(Frozen):
    """A model soup (arXiv 2203.05482) of each run: the uniform mean of exported checkpoints, made after training."""

    name: str = Field(pattern=NAME_PATTERN)
    steps: tuple[int, ...] = Field(min_length=2, description="permanent checkpoints that are averaged, rising")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.steps)):
            raise ValueError(f"the steps of {self.name} do not rise; list each once, the first one first")
        return self


class MeasuredModel(NamedTuple):
    """A model of a run that is measured: the weights after update `step`, or an average of weights up to there."""

    step: int
    average: str | None = None  # its name: lawa5x500 of one kept in training, or the soup's
    soup_of: tuple[int, ...] = ()  # the steps whose exports a soup averages


class Study(Frozen):
    """One study, resolved: what is trained and what is measured at every checkpoint. The content of study.json."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str
    ranks: int = Field(gt=0, description="processes of one training run")
    corpus: CorpusSettings
    settings: tuple[str, ...] = Field(default=(), description="key.path=value, applied to every run of the recipe")
    runs: tuple[RunConfig, ...] = Field(min_length=1)
    quantization: QuantizationSettings
    curvature: CurvatureSettings
    averaged_steps: tuple[int, ...] = Field(
        default=(), description="steps at which the averages kept in training are quantized; curvature is not measured"
    )
    soups: tuple[SoupSettings, ...] = Field(default=(), description="made of each run, and quantized")

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError(f"two runs share a name among {', '.join(names)}")
        soups = [soup.name for soup in self.soups]
        for run in self.runs:
            averages = [*soups, *(average.name for average in run.averages)]
            if len(set(averages)) != len(averages):
                raise ValueError(f"two averages of run {run.name} share a name among {', '.join(averages)}")
            for soup in self.soups:
                if not set(soup.steps) <= set(run.save_steps):
                    missing = min(set(soup.steps) - set(run.save_steps))
                    raise ValueError(f"{soup.name} takes in step {missing}, run {run.name} saves none there")
            if run.model.family != "olmo2":
                raise ValueError(f"run {run.name} trains {run.model.family}; a study measures olmo2 alone")
            unsaved = sorted(set(self.averaged_steps) - set(run.save_steps)) if run.averages else []
            if self.quantization.by_block and len(run.save_steps) < 2:
                raise ValueError(f"run {run.name} saves one checkpoint, a slice goes through the last two; save more")
            if unsaved:
                raise ValueError(f"averages are to be measured at step {unsaved[0]}, run {run.name} saves none there")
        return self

    def models_of(self, run: RunConfig) -> list[MeasuredModel]:
        """Every model of the run that is measured, by rising step; averages follow the weights of their last step."""
        models = []
        for step in run.save_steps:
            models.append(MeasuredModel(step))
            if step in self.averaged_steps:
                models += [MeasuredModel(step, average.name) for average in run.averages]
            models += [MeasuredModel(step, soup.name, soup.steps) for soup in self.soups if soup.steps[-1] == step]
        return models

    def label_of(self, run: RunConfig) -> str:
        """The run's peak learning rate; its name where another run has the same peak."""
        peaks = [other.optimizer.peak_lr for other in self.runs]
        peak = run.optimizer.peak_lr
        return f"{peak:g}" if peaks.count(peak) == 1 else run.name

    def specs_of(self, run: RunConfig, model: MeasuredModel) -> tuple[str, ...]:
        """What a model of the run is quantized with: the weights at the end of training with every method."""
        settings = self.quantization
        return settings.at_the_end if model == MeasuredModel(run.total_steps) else settings.specs


def spec_title(spec: str) -> str:
    """A spec in words; what its name leaves out, the title does.

    >>> [spec_title(spec) for spec in ("gptq-b3-g32", "int8-t6")]
    ['GPTQ, 3 bits, groups of 32', 'LLM.int8(), threshold 6']
    """
    parsed = parse_spec(spec)
    defaults = parsed.row.defaults
    parts = ["GPTQ by gptqmodel" if parsed.method == "gptqmodel" else parsed.row.title]
    if len(parsed.row.bits) > 1:
        parts.append(f"{parsed.bits} bits")
    if "group_size" in defaults:
        parts.append(f"groups of {parsed.group_size}" if parsed.group_size else "one scale per channel")
    if parsed.symmetric != defaults.get("symmetric"):
        parts.append("symmetric" if parsed.symmetric else "asymmetric")
    if parsed.order not in (None, "natural"):
        parts.append(ORDERS[parsed.order])
    if parsed.static_groups:
        parts.append("static groups")
    for option in ("damping", "alpha", "threshold"):
        value = getattr(parsed, option)
        if value != defaults.get(option):
            parts.append(f"{option} {value:g}")
    if parsed.scales == "fp16":
        parts.append("fp16 scales")
    return ", ".join(parts)


def save_study(directory: Path, study: Study) -> None:
    """Writes study.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "study.json", study.model_dump(mode="json"))


def load_study(directory: Path) -> Study:
    """The study of a study directory; UserError if it holds none or one of another version."""
    path = directory / "study.json"
    try:
        return Study.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; start the study with 'python -m study run NAME --root ROOT'") from None
    except ValidationError as error:
        raise explain_validation(str(path), error) from None


def write_run_configurations(directory: Path, study: Study) -> None:
    """Writes RUN/run.json of every run; UserError where a name already belongs to another configuration."""
    paths = {run.name: RunDirectory(directory / run.name).run_json for run in study.runs}
    missing = [run for run in study.runs if not paths[run.name].exists()]
    for run in study.runs:
        path = paths[run.name]
        if run not in missing and load_run(path) != run:
            raise UserError(
                f"{path} holds another configuration than recipe {study.name}; a run's name is used once: remove "
                f"{path.parent} to train it again, or choose another --root"
            )
    for run in missing:
        paths[run.name].parent.mkdir(parents=True, exist_ok=True)
        write_json(paths[run.name], dump_run(run))
