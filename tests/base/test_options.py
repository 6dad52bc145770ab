"""Options generated from a class of settings: names, defaults, choices, and what is refused."""

from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
import typer
from pydantic import Field, model_validator
from typer.testing import CliRunner

from base.cli import options_of
from base.errors import UserError
from base.frozen import Frozen


class Settings(Frozen):
    kind: Literal["small"] = "small"
    num_pairs: Annotated[int, Field(ge=2)] = Field(default=32, description="pairs of a probe")
    length: Annotated[int, Field(ge=1)] | None = Field(default=None, description="tokens")
    with_top: bool = Field(default=True, description="measure the eigenvalue")
    thrifty: bool = Field(default=False, description="keep only inputs")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="place of the model")
    hidden: int = 3

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.thrifty and "length" in self.model_fields_set:
            raise ValueError("--length does not go with --thrifty; leave one out")
        return self


@pytest.fixture
def run():
    app, received = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @options_of(Settings)
    def measure(
        paths: Annotated[list[Path], typer.Argument(help="Directories.")], settings: Settings
    ) -> None:
        """Measure."""
        received.append((paths, settings))

    def start(*arguments):
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
        return done, received[-1] if received else None

    return start


def test_an_option_for_every_described_field(run):
    done, (paths, settings) = run("a", "b", "--num-pairs", "4", "--no-with-top")
    assert done.exit_code == 0
    assert paths == [Path("a"), Path("b")]
    assert settings == Settings(num_pairs=4, with_top=False)
    assert settings.model_fields_set == {"num_pairs", "with_top"}


def test_help_has_whole_names_defaults_and_choices(run):
    text = run("--help")[0].output
    for words in (
        "--num-pairs",
        "--length <int>",
        "Pairs of a probe.",
        "default: 32",
        "--with-top / --no-with-top",
    ):
        assert words in text
    assert "cpu|cuda" in text
    assert "hidden" not in text
    assert "kind" not in text
    assert "--no-thrifty" not in text


def test_refusals(run):
    assert run("a", "--device", "tpu")[0].exit_code == 2
    for options, message in (
        (["--num-pairs", "1"], "measure: 'num_pairs': Input should be greater than or equal to 2"),
        (["--thrifty", "--length", "4"], "measure: --length does not go with --thrifty"),
    ):
        error = run("a", *options)[0].exception
        assert isinstance(error, UserError)
        assert message in str(error)
