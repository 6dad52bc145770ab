"""The options that decide the numbers, besides the model and the spec.

A study holds LossSettings, QuestionSettings and OutlierSettings. RunSettings, TaskSettings and
OutlierRunSettings, of the commands, add what a study decides for each step: texts, device, and what
is saved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from base.errors import UserError
from base.frozen import Frozen
from quant_eval.paper_tasks import choose_tasks
from quant_eval.quantizer import QuantSpec

CHECKPOINT = "checkpoint"  # saved in GPTQ's format below a result's directory
LINEARS = "linears"  # names results of outlier statistics, where others have a spec
BLOCK_TOKENS = 2048  # of arXiv:2510.06213 (appendix A)
Bos = Literal["template", "none"]  # see `quant_eval.bos`


class NumberSettings(Frozen):
    """The arithmetic, which moves results by rounding only, but for the dtype."""

    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of the full and of the quantized model"
    )
    batch_size: int = Field(
        default=8, ge=1, description="sequences per forward pass; moves results by rounding only"
    )


class ComputeSettings(NumberSettings):
    """The settings of the machine."""

    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where it is computed")


class SequenceSettings(NumberSettings):
    """The part of a text that a model sees at once, and its beginning."""

    bos: Bos = Field(
        default="template",
        description=(
            "token before each text: template: the one that the model's tokenizer puts there, if"
            " any; none"
        ),
    )
    sequence_length: int | None = Field(
        default=None,
        ge=2,
        description=(
            f"tokens the model sees at once; if not given {BLOCK_TOKENS}, or its context if less"
        ),
    )

    def block_length(self, context: int) -> int:
        """Return the number of tokens that a model of that context sees at once."""
        if self.sequence_length is not None and self.sequence_length > context:
            raise UserError(
                f"{self.sequence_length} tokens are longer than the model's context of {context};"
                " give fewer"
            )
        return self.sequence_length or min(BLOCK_TOKENS, context)


class DrawSettings(SequenceSettings):
    """The draws of the texts, and how the models see them."""

    calibration_sequences: int = Field(
        default=128, ge=1, description="sequences for calibration, none twice"
    )
    calibration_documents: Literal["packed", "separate"] = Field(
        default="packed",
        description=(
            "packed: sequences of the same length, drawn from documents that are joined; separate:"
            " each a document, the first of the file, up to the model's context or"
            " sequence_length, as arXiv:2510.06213 did"
        ),
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="of the first calibration draw, of random signs and of the bootstrap",
    )


class LossSettings(DrawSettings):
    """The losses before and after quantization, but for the texts: what a study holds."""

    eval_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "draw documents, the same for every model and spec, until they hold this many targets;"
            " if not given all"
        ),
    )
    eval_seed: int = Field(
        default=0,
        ge=0,
        description="of the draw of documents; all calibration draws share them",
    )
    documents: Literal["separate", "concatenated"] = Field(
        default="separate",
        description=(
            "separate: none sees another; concatenated: without separator, as arXiv:2510.06213 did"
        ),
    )
    calibration_seeds: int = Field(
        default=1,
        ge=1,
        description="calibration draws, each quantized and measured; one for specs that read none",
    )


class QuestionSettings(DrawSettings):
    """The questions to both models, but for the texts: what a study holds."""

    tasks: str = Field(
        default="paper",
        description="names with commas between; paper: the twelve of arXiv:2510.06213",
    )
    shots: int = Field(default=5, ge=0, description="examples before each question")
    limit: int | None = Field(
        default=None,
        ge=1,
        description="first items of each task, of mmlu of each subject; if not given all",
    )
    task_files: Path | None = Field(
        default=None,
        description=(
            "directory with TASK.jsonl, and TASK.fewshot.jsonl for the examples;"
            " mmlu/SUBJECT.jsonl for mmlu; if not given the Hugging Face hub"
        ),
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, in the order of the table."""
        return choose_tasks(self.tasks)


def check_calibration(specs: Sequence[QuantSpec], settings: DrawSettings) -> None:
    """Raise UserError for a spec that takes sequences of one length alone, where they differ."""
    for spec in specs if settings.calibration_documents == "separate" else ():
        if spec.needs_equal_lengths:
            raise UserError(
                f"{spec.name} is learned on sequences of one length; leave calibration_documents at"
                " packed"
            )


class CalibrationSettings(ComputeSettings, DrawSettings):
    """The text that methods are calibrated on."""

    calibration: Path | None = Field(
        default=None,
        description=(
            "token file PREFIX to calibrate on; specs that nothing is fitted for, such as rtn, do"
            " not read it"
        ),
    )

    def calibration_length(self, context: int) -> int:
        """Return the number of tokens of a calibration sequence, of a document the most."""
        if self.calibration_documents == "separate" and self.sequence_length is None:
            return context
        return self.block_length(context)

    def of_specs(self, specs: Sequence[QuantSpec]) -> Self:
        """Return the settings for these specs, without the text if none of them reads it.

        UserError if one needs the text and there is none, or does not take it as it is.
        """
        calibrated = [spec.name for spec in specs if spec.needs_calibration]
        if calibrated and self.calibration is None:
            raise UserError(f"{calibrated[0]} is calibrated on text; give it with --calibration")
        check_calibration(specs, self)
        return self if calibrated else self.model_copy(update={"calibration": None})

    def calibration_text(self, sha256: str | None, length: int | None) -> dict[str, Any] | None:
        """Return the description of the text in a result, given the hash of its token file."""
        if self.calibration is None:
            return None
        return {
            "prefix": str(self.calibration),
            "sha256": sha256,
            "sequences": self.calibration_sequences,
            "documents": self.calibration_documents,
            "sequence_length": length,
            "seed": self.seed,
            "bos": self.bos,
        }


class OutlierSettings(SequenceSettings):
    """Outlier statistics of what linears read and of their weights, but for the text."""

    eval_tokens: int = Field(
        default=16_384,
        ge=1,
        description="draw documents, the same for every model, until they hold this many targets",
    )
    eval_seed: int = Field(default=0, ge=0, description="of the draw of documents")


class OutlierRunSettings(ComputeSettings, OutlierSettings):
    """All settings of outlier statistics."""

    data: Path = Field(description="token file PREFIX that the models read")

    def described(self, context: int, sha256: str) -> dict[str, Any]:
        """Return the description of the settings in a result, from the hash of the text.

        `context` is the model's, in tokens.
        """
        return {
            "dtype": self.dtype,
            "outliers": {
                "prefix": str(self.data),
                "sha256": sha256,
                "sequence_length": self.block_length(context),
                "max_tokens": self.eval_tokens,
                "seed": self.eval_seed,
                "bos": self.bos,
            },
        }


class RunSettings(CalibrationSettings, LossSettings):
    """All settings of the losses before and after quantization."""

    eval: Path = Field(description="token file PREFIX the losses are measured on")
    per_block: bool = Field(
        default=False, description="also quantize each block alone, and all but it"
    )
    save: bool = Field(
        default=False,
        description=(
            "also save a checkpoint in compressed-tensors' format; in GPTQ's for specs with -s16"
        ),
    )
    dense: bool = Field(
        default=False, description="also write the dequantized weights, to the result's dense/"
    )

    def texts(self, context: int, calibration: str | None, evaluation: str) -> dict[str, Any]:
        """Return the description of the texts in a result, from the hashes of their files.

        `context` is the model's, in tokens.
        """
        drawn = self.calibration_text(calibration, self.calibration_length(context))
        return {
            "calibration": drawn and drawn | {"seeds": self.calibration_seeds},
            "evaluation": {
                "prefix": str(self.eval),
                "sha256": evaluation,
                "sequence_length": self.block_length(context),
                "max_tokens": self.eval_tokens,
                "seed": self.eval_seed,
                "documents": self.documents,
                "bos": self.bos,
                "logits": "fp32",  # of both models, whatever their dtype
            },
        }


class TaskSettings(CalibrationSettings, QuestionSettings):
    """All settings of the questions to both models."""

    def described(self, calibration_sha256: str | None) -> dict[str, Any]:
        """Return the description of the settings in a result, the tasks' documents aside."""
        return {
            "calibration": self.calibration_text(calibration_sha256, self.sequence_length),
            "num_fewshot": self.shots,
            "limit": self.limit,
            "seed": self.seed,
            "bos": self.bos,
        }
