"""The configuration of the data of a run."""

from typing import Annotated, Literal

from pydantic import Field

from base.frozen import Frozen


class RepetitionFilter(Frozen):
    """OLMo2's instance filter: a sequence with such a repetition is trained on with zero loss.

    A sequence is dropped if some n-gram of `min_period` to `max_period` tokens is repeated at least
    `max_count` times in a row (allenai/OLMo, olmo/data/util.py, `find_periodic_sequences`).
    """

    min_period: int = Field(default=1, gt=0)
    max_period: int = Field(default=13, gt=0)
    max_count: int = Field(default=32, gt=1)


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class DataConfig(Frozen):
    """Token files of `python -m train prepare` or `index`; relative to the run directory."""

    train: str
    held_out: str
    more_held_out: dict[SetName, str] = Field(
        default={}, description="further held-out files by name; NAME's loss is held_out_loss.NAME"
    )
    tokenizer: str = Field(description="directory of the tokenizer, copied into every export")
    sequence_length: int = Field(
        gt=1, description="tokens the model sees at once; also its maximal context"
    )
    held_out_sequences: int = Field(
        gt=0, description="first sequences of a held-out file, for each held-out loss"
    )
    order: Literal["permutation", "olmo", "sequential"] = Field(
        default="permutation",
        description=(
            "of the training sequences: a bijection computed on the fly, OLMo's PCG64 shuffle, or"
            " the order of the file"
        ),
    )
    repetition_filter: RepetitionFilter | None = None
    document_mask: bool = Field(
        default=False,
        description=(
            "attention stays inside a document, which ends with the end-of-text token, in training"
            " and in held-out losses; the probe of a checkpoint is computed without"
        ),
    )
