"""The text of a study: what it trains on, calibrates with and is measured on, and the commands that make it."""

from typing import Literal

from pydantic import Field

from train.frozen import NAME_PATTERN, Frozen

TEXTS = "texts"  # below the root: token files and tokenizers that studies share


class StandardLibrary(Frozen):
    """The source of the running interpreter's standard library, and a tokenizer trained on it."""

    kind: Literal["standard_library"] = "standard_library"
    vocab_size: int = Field(gt=256, description="tokens of the byte-level BPE, end-of-text and 256 bytes included")
    held_out_percent: int = Field(gt=0, lt=100, description="share of the files kept for measuring")
    held_out_characters: int = Field(gt=0, description="kept of each held-out file")


class TokenFile(Frozen):
    """A token file ROOT/texts/NAME.{bin,idx,json} that studies share."""

    name: str = Field(pattern=NAME_PATTERN)
    dataset: str | None = Field(default=None, description="on the hub; None: it has to be made before, see `origin`")
    config: str | None = None
    split: str = "train"
    files: str | None = Field(default=None, description="of the dataset's files only those, such as 2 or 1-8")
    key: str = Field(default="text", description="column that holds the text")
    origin: str = Field(default="", description="how it is made where no dataset is named")


class PreparedText(Frozen):
    """Token files below ROOT/texts, which studies with the same tokenizer share."""

    kind: Literal["prepared"] = "prepared"
    tokenizer: str = Field(description="OWNER/NAME on the hub, kept as ROOT/texts/OWNER--NAME")
    train: TokenFile | None = Field(default=None, description="None: nothing is trained")
    held_out: TokenFile = Field(description="losses and curvature are measured on it")
    calibration: TokenFile

    @property
    def tokenizer_directory(self) -> str:
        """Its place, relative to the root."""
        return f"{TEXTS}/{self.tokenizer.replace('/', '--')}"

    @property
    def files(self) -> dict[str, TokenFile]:
        """By what they are for; a file may serve twice."""
        files = {"held_out": self.held_out, "calibration": self.calibration}
        return files | ({"train": self.train} if self.train else {})


class TokenFiles(Frozen):
    """Token files that are there already, such as those of another study; nothing is trained."""

    kind: Literal["files"] = "files"
    held_out: str = Field(pattern="^/", description="absolute PREFIX")
    calibration: str = Field(pattern="^/", description="absolute PREFIX")
