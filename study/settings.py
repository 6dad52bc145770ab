"""What a study is: its runs and what is measured of them, resolved. The content of study.json."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from quant_eval.specs import parse_spec
from train.command import UserError, explain_validation
from train.config import RunConfig
from train.frozen import NAME_PATTERN, Frozen
from train.run_directory import write_json


class CorpusSettings(Frozen):
    """The text of the running interpreter's standard library and the tokenizer trained on it."""

    vocab_size: int = Field(gt=256, description="tokens of the byte-level BPE, end-of-text and 256 bytes included")
    held_out_percent: int = Field(gt=0, lt=100, description="share of the files kept for measuring")
    held_out_characters: int = Field(gt=0, description="kept of each held-out file")


class QuantizationSettings(Frozen):
    """What every checkpoint is quantized with, calibrated on and evaluated on."""

    specs: tuple[str, ...] = Field(min_length=1)
    calibration_sequences: int = Field(ge=1)
    eval_tokens: int = Field(ge=1, description="predicted tokens behind each loss")

    @model_validator(mode="after")
    def _canonical(self) -> Self:
        # A spec names a directory and a column, so it must be written in its one canonical form.
        for spec in self.specs:
            canonical = parse_spec(spec).name
            if spec != canonical:
                raise ValueError(f"write {canonical} instead of {spec}")
        if len(set(self.specs)) != len(self.specs):
            raise ValueError("a spec is listed twice")
        return self


class CurvatureSettings(Frozen):
    """Hessian of the held-out loss at every checkpoint: trace by Hutchinson, top eigenvalue by Lanczos."""

    pairs: int = Field(ge=2, description="(probe, microbatch) pairs behind the trace")
    microbatch_sequences: int = Field(ge=1)
    eigen_sequences: int = Field(ge=1)
    tolerance: float = Field(gt=0, description="relative residual that counts as converged")


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


def spec_title(spec: str) -> str:
    """'GPTQ, 3 bits, groups of 32' for gptq-b3-g32."""
    parsed = parse_spec(spec)
    scale = f"groups of {parsed.group_size}" if parsed.group_size else "one scale per channel"
    return f"{parsed.method.upper()}, {parsed.bits} bits, {scale}"


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
