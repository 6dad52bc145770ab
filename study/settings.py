"""What a study is: its text, its runs and what is measured of them, resolved. The content of study.json."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from quant_eval.specs import parse_spec
from study.released import ReleasedRun
from study.text import OwnText, PreparedText, StandardLibrary, TokenFiles
from train.command import UserError, explain_validation
from train.config import RunConfig
from train.frozen import NAME_PATTERN, Frozen, fingerprint
from train.run_directory import write_json

ORDERS = {"actorder": "activation order", "groupaware": "group-aware order"}


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
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of the full and the quantized model alike")

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
    """Hessian of the held-out loss at every checkpoint: traces from pairs, and the top eigenvalue by Lanczos.

    At the last checkpoint of each run also along the steps of `QuantizationSettings.by_block`, and the loss on a plane.
    """

    pairs: int = Field(ge=2, description="(probe, microbatch) pairs behind the trace")
    norm_pairs: int = Field(ge=2, description="pairs whose probes are restricted to the norms")
    companion_pairs: int = Field(ge=2, description="microbatches of the Gauss-Newton and Fisher traces")
    microbatch_sequences: int = Field(ge=1)
    lambda_max: bool = Field(default=True, description="whether the top eigenvalue is measured; it takes vectors")
    fixed_sequences: int = Field(default=16, ge=1, description="sequences of the fixed batch of the eigenvalue")
    tolerance: float = Field(default=1e-2, gt=0, description="relative residual that counts as converged")
    max_iterations: int = Field(default=16, ge=2, description="iterations to the eigenvalue, of a vector each, at most")
    sequence_length: int | None = Field(default=None, ge=1, description="tokens; None: the model's context")
    warm_start: bool = Field(
        default=False,
        description="start the iteration from the top eigenvector of the checkpoint before: that of each is kept, 4 "
        "bytes a weight, and a run's checkpoints are measured one after the other",
    )
    step_microbatches: int = Field(ge=2, description="behind every figure of a quantization step")
    slice_grid: int = Field(ge=3, description="points along either axis of a slice")
    slice_sequences: int = Field(ge=2, description="sequences that every loss of a slice is over")
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of the products' matrices")
    vectors: Literal["device", "host"] = Field(default="device", description="where vectors over all weights lie")
    checkpointing: bool = Field(default=False, description="keep only the blocks' inputs: slower, far less memory")

    @model_validator(mode="after")
    def _warms_an_eigenvalue(self) -> Self:
        if self.warm_start and not self.lambda_max:
            raise ValueError("warm_start is of lambda_max, which is not measured; leave it out")
        return self


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
    revision: str | None = None  # of a released model: its name there


class Varied(Frozen):
    """The quantity that a study sweeps, for the figure of final errors against it."""

    name: str = Field(description="such as 'weight decay'")
    unit: str = ""
    scale: Literal["log", "linear"] = "log"
    values: dict[str, float] = Field(description="by the name of the run; positive on a logarithmic axis")
    groups: dict[str, str] = Field(default={}, description="line that a run belongs to, such as 'cosine'; none: one")

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        outside = [name for name, value in self.values.items() if value <= 0 and self.scale == "log"]
        if outside:
            raise ValueError(f"{self.name} of {outside[0]} has no place on a logarithmic axis; make it linear")
        return self


def _whose(run: Any) -> str:
    known = run if isinstance(run, dict) else dict(run)
    return "released" if "revisions" in known else "trained"


Run = Annotated[
    Annotated[RunConfig, Tag("trained")] | Annotated[ReleasedRun, Tag("released")], Discriminator(_whose)
]  # so that what is wrong with a run is said of that kind of run alone


class Study(Frozen):
    """One study, resolved: what is trained and what is measured at every checkpoint. The content of study.json.

    A run is trained here, from scratch or from a checkpoint of another run of the study (`branch_from`), or it is a
    stage of a released model.
    """

    name: str = Field(pattern=NAME_PATTERN)
    description: str
    sources: tuple[str, ...] = Field(default=(), description="where the recipe's figures come from")
    ranks: int = Field(gt=0, description="processes of one training run on the CPU of one machine")
    sized_for: Literal["cpu", "cuda", "any"] = Field(
        default="cuda", description="what the study runs on unless it is told; any: GPUs where there are"
    )
    text: Annotated[StandardLibrary | PreparedText | OwnText | TokenFiles, Field(discriminator="kind")]
    settings: tuple[str, ...] = Field(default=(), description="key.path=value, applied to every run of the recipe")
    runs: tuple[Run, ...] = Field(min_length=1)
    heading: str = Field(default="peak learning rate", description="what tells the runs apart in legends")
    labels: dict[str, str] = Field(default={}, description="of runs, by name; default: the peak learning rate")
    varied: Varied | None = None
    quantization: QuantizationSettings
    curvature: CurvatureSettings | None = Field(default=None, description="None: not measured")
    averaged_steps: tuple[int, ...] = Field(
        default=(), description="steps at which the averages kept in training are quantized; curvature is not measured"
    )
    soups: tuple[SoupSettings, ...] = Field(default=(), description="made of each run that saves their steps")

    @property
    def trained(self) -> tuple[RunConfig, ...]:
        """The runs that the study trains itself."""
        return tuple(run for run in self.runs if isinstance(run, RunConfig))

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [run.name for run in self.runs]
        if len(set(names)) != len(names):
            raise ValueError(f"two runs share a name among {', '.join(names)}")
        unknown = sorted({*self.labels, *(self.varied.values if self.varied else ())} - set(names))
        if unknown:
            raise ValueError(f"{unknown[0]} is labelled, but no run has that name")
        labels = [self.label_of(run) for run in self.runs]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two runs share a label among {', '.join(labels)}; say in labels what tells them apart")
        saved = {step for run in self.trained for step in run.save_steps}
        if not set(self.averaged_steps) <= saved:
            unsaved = min(set(self.averaged_steps) - saved)
            raise ValueError(f"averages are to be measured at step {unsaved}, no run saves one there")
        if self.quantization.by_block and not self.curvature:
            raise ValueError("by_block measures curvature along the steps; give curvature, or leave by_block out")
        if self.trained and getattr(self.text, "train", self) is None:
            raise ValueError(f"run {self.trained[0].name} is trained, but the text names no training file; give one")
        for soup in self.soups:
            if not any(self.has_soup(run, soup) for run in self.trained):
                raise ValueError(f"{soup.name} takes in steps {list(soup.steps)}, which no run saves all; correct them")
        for run in self.trained:
            self._check_run(run)
        return self

    def _check_run(self, run: RunConfig) -> None:
        averages = [
            *(soup.name for soup in self.soups if self.has_soup(run, soup)),
            *(average.name for average in run.averages),
        ]
        if len(set(averages)) != len(averages):
            raise ValueError(f"two averages of run {run.name} share a name among {', '.join(averages)}")
        if self.quantization.by_block and len(run.save_steps) < 2:
            raise ValueError(f"run {run.name} saves one checkpoint, a slice goes through the last two; save more")
        if run.branch_from:
            parent = self.parent_of(run)
            if parent.branch_from:
                raise ValueError(f"{run.name} branches from {parent.name}, a branch itself; branch from its parent")
            if run.branch_from.step not in parent.save_steps:
                raise ValueError(f"{run.name} branches at step {run.branch_from.step}, {parent.name} saves none there")
            if run.branch_from.fingerprint != fingerprint(parent):
                raise ValueError(f"{run.name} names another fingerprint than that of its parent {parent.name}")

    def has_soup(self, run: RunConfig, soup: SoupSettings) -> bool:
        """Whether the soup is made of this run: it saves all its steps."""
        return set(soup.steps) <= set(run.save_steps)

    def parent_of(self, run: RunConfig) -> RunConfig:
        """The run of this study that `run` branches from; ValueError if there is none."""
        assert run.branch_from
        for parent in self.trained:
            if run.branch_from.run == f"../{parent.name}":
                return parent
        raise ValueError(f"{run.name} branches from {run.branch_from.run}, which is no run of the study")

    def models_of(self, run: RunConfig | ReleasedRun) -> list[MeasuredModel]:
        """Every model of the run that is measured, by rising step; averages follow the weights of their last step."""
        if isinstance(run, ReleasedRun):
            return [MeasuredModel(revision.step, revision=revision.name) for revision in run.revisions]
        models = []
        for step in run.save_steps:
            models.append(MeasuredModel(step))
            if step in self.averaged_steps:
                models += [MeasuredModel(step, average.name) for average in run.averages]
            models += [
                MeasuredModel(step, soup.name, soup.steps)
                for soup in self.soups
                if soup.steps[-1] == step and self.has_soup(run, soup)
            ]
        return models

    def label_of(self, run: RunConfig | ReleasedRun) -> str:
        """What the run is called in legends: by default its peak learning rate, its name where another has the same."""
        if run.name in self.labels or isinstance(run, ReleasedRun):
            return self.labels.get(run.name, run.name)
        peaks = [other.optimizer.peak_lr for other in self.trained]
        peak = run.optimizer.peak_lr
        return f"{peak:g}" if peaks.count(peak) == 1 else run.name

    def specs_of(self, run: RunConfig | ReleasedRun, model: MeasuredModel) -> tuple[str, ...]:
        """What a model of the run is quantized with: the weights at the end of training with every method."""
        settings = self.quantization
        at_the_end = model.average is None and model.step == run.total_steps
        return settings.at_the_end if at_the_end else settings.specs


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
