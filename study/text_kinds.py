"""The text of a study, to train on, to calibrate with and to measure on; and where it is kept."""

from pathlib import PurePosixPath
from typing import Annotated, Literal, assert_never

from pydantic import Field

from base.frozen import NAME_PATTERN, Frozen
from train.data.manifest import Share

CORPUS = "data/corpus"  # below a study
TEXTS = "texts"  # below the root: token files and tokenizers that studies share


# Of requirements.lock, without compiled parts: one wheel for all interpreters and machines. The
# hash is over the files that `study.text.package_sources` reads.
PACKAGES = (
    "mpmath==1.3.0#sha256=a708015f92e74e7c39d84e4338c172ff0515004df453420f6f298dcf5a0da030",
    "networkx==3.6.1#sha256=399cbbfd66106d120837fb3a644b7a6684f23c125f1b6a26339b8fc3675e4b7d",
    "sympy==1.14.0#sha256=5cfd33ec92cf6d64e418c9d7568e0119598b8a8880c2f0fa4cb9564c806f1f97",
)
# Three times as much text, of which half of the longer lines are those of other files: its models
# repeat each other.
MORE_PACKAGES = (
    *PACKAGES,
    "transformers==5.17.0#sha256=b6ab8fcf3e242c3bf3dfad2b48269e11839e9ae9f34e9b94f7dc16b5010980db",
)
PackageName = Annotated[str, Field(pattern=r"^[\w.-]+==[\w.]+#sha256=[0-9a-f]{64}$")]


class PackageSources(Frozen):
    """The source of pinned Python packages, and a tokenizer trained on it."""

    kind: Literal["packages"] = "packages"
    packages: tuple[PackageName, ...] = Field(
        default=PACKAGES, min_length=1, description="NAME==VERSION#sha256=HASH"
    )
    vocab_size: int = Field(
        gt=256, description="tokens of the byte-level BPE, end-of-text and 256 bytes included"
    )


class TokenFile(Frozen):
    """A token file ROOT/texts/NAME.{bin,idx,json} that studies share, or one that is elsewhere."""

    name: str = Field(
        pattern=f"{NAME_PATTERN}|^/", description="or absolute PREFIX of one that is there already"
    )
    dataset: str | None = Field(
        default=None, description="on the hub; None: it has to be made before, see `origin`"
    )
    config: str | None = None
    split: str = "train"
    files: str | None = Field(
        default=None, description="of the dataset's files only those, such as 2 or 1-8"
    )
    key: str = Field(default="text", description="column that holds the text")
    origin: str = Field(default="", description="how it is made where no dataset is named")


class PreparedText(Frozen):
    """Token files below ROOT/texts, which studies with the same tokenizer share, or in place.

    In place are those of another study, for example: absolute, with their tokenizer's directory.
    """

    kind: Literal["prepared"] = "prepared"
    tokenizer: str = Field(
        description="OWNER/NAME on the hub, kept as ROOT/texts/OWNER--NAME; or absolute: directory"
    )
    train: TokenFile | None = Field(default=None, description="None: nothing is trained")
    held_out: TokenFile = Field(description="losses and curvature are measured on it")
    calibration: TokenFile
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="of the contents and the tokenizer that --text names; None: of a recipe",
    )

    @property
    def tokenizer_directory(self) -> str:
        """The directory of the tokenizer, relative to the root or absolute."""
        if self.tokenizer.startswith("/"):
            return self.tokenizer
        return f"{TEXTS}/{self.tokenizer.replace('/', '--')}"

    @property
    def files(self) -> dict[str, TokenFile]:
        """The token files by use; a file may serve twice."""
        files = {"held_out": self.held_out, "calibration": self.calibration}
        return files | ({"train": self.train} if self.train else {})


class OwnText(Frozen):
    """Text of the user's: files, or one token file, shared out by document; see `study.text.own`.

    Everything that is made of it is in the study's own directory, and no step needs a network.
    """

    kind: Literal["own"] = "own"
    sources: tuple[str, ...] = Field(
        min_length=1, description="absolute: files of text, or PREFIX of a token file"
    )
    key: str | None = Field(
        default=None, description="field or column of the files that holds the text; None: tokens"
    )
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        description="of the sources' contents, the given tokenizer and a key other than 'text'",
    )
    tokenizer: str | None = Field(
        default=None, description="absolute: directory it is copied from; None: trained"
    )
    vocab_size: int = Field(gt=256, description="tokens of a trained tokenizer")
    train: Share | None = Field(
        default=None, description="of the documents; None: nothing is trained"
    )
    train_tokens: int = Field(
        ge=0, description="that the longest run reads: the least that has to come out"
    )
    held_out: Share
    held_out_tokens: int = Field(gt=0, description="the least that has to come out")
    document_tokens: int = Field(
        gt=1, description="kept of each held-out document, so that there are many"
    )
    calibration: Share
    calibration_tokens: int = Field(gt=0, description="the least that has to come out")


Text = PackageSources | PreparedText | OwnText
USES = ("train", "held_out", "calibration")


def places_of(text: Text) -> dict[str, str]:
    """Return PREFIX of the token file for every use, and the directory of the tokenizer.

    The keys are train, held_out, calibration and tokenizer, those that there are.
    """
    match text:
        case PreparedText():
            # below the root; what is absolute stays
            root = PurePosixPath("{root}")
            places = {use: str(root / TEXTS / file.name) for use, file in text.files.items()}
            return places | {"tokenizer": str(root / text.tokenizer_directory)}
        case PackageSources():
            places = {use: f"{{study}}/data/{use}" for use in USES}
            return places | {"tokenizer": f"{{study}}/{CORPUS}/tokenizer"}
        case OwnText():
            # A study that trains nothing has no share to train on.
            uses = [use for use in USES if getattr(text, use)]
            return {use: f"{{study}}/data/{use}" for use in (*uses, "tokenizer")}
        case _:
            assert_never(text)
