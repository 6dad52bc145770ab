"""Settings and the words of a command line are each other's inverse, and a study's steps give every
command the settings that the study holds.
"""

import random
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from base.cli import arguments_of, options_of
from curvature.__main__ import app as curvature_app
from curvature.settings import (
    HutchinsonSettings,
    LanczosSettings,
    PlaneSettings,
    PredictionSettings,
    SliceSettings,
    StepSettings,
)
from quant_eval.__main__ import app as quant_eval_app
from quant_eval.settings import RunSettings, TaskSettings
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.tasks import TasksSettings
from study.recipes.resolve import resolve
from study.steps import steps_of
from train.run.launch import Launch

CLASSES = (
    *(RunSettings, TaskSettings, HutchinsonSettings, LanczosSettings, StepSettings),
    *(SliceSettings, Launch),
)
PLACEHOLDERS = {"{sharding}": "none", "{device}": "cpu"}
DECIDED = {"device", "sharding", "level", "name"}  # by a step, or a constant


def random_value(field: FieldInfo, annotation: Any, draw: random.Random) -> Any:
    """A value of the type of a field, within its limits; None only where it is the default."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return random_value(FieldInfo.merge_field_infos(field, *inner[1:2]), inner[0], draw)
    if origin is Literal:
        return draw.choice(inner)
    if origin is Union or type(None) in inner:
        kinds = [each for each in inner if each is not type(None) or field.default is None]
        return random_value(field, draw.choice(kinds), draw)
    if annotation is type(None):
        return None
    if annotation is int:
        return draw.randrange(2, 500)
    if annotation is float:
        return draw.choice([draw.random(), 10 ** draw.uniform(-9, -1)])
    texts = {bool: draw.random() < 0.5, Path: Path(draw.choice(["a/b", "a b", "-x"]))}
    return texts.get(annotation, draw.choice(["paper", "piqa,sciq"]))


def random_settings(kind: type[BaseModel], draw: random.Random) -> BaseModel:
    while True:
        values = {
            name: random_value(field, field.annotation, draw)
            for name, field in kind.model_fields.items()
            if field.description
        }
        try:
            return kind(**values)
        except ValidationError:  # fields that do not go together
            continue


@pytest.mark.parametrize("kind", CLASSES)
def test_a_command_that_is_given_the_arguments_of_settings_has_these_settings(kind):
    received: list[BaseModel] = []
    app, draw = typer.Typer(), random.Random(kind.__name__)

    @app.command()
    @options_of(kind)
    def command(settings: BaseModel) -> None:
        received.append(settings)

    sent = [random_settings(kind, draw) for _ in range(50)]
    for settings in sent:
        app(arguments_of(settings), standalone_mode=False)
    assert received == sent
    assert len(set(map(str, sent))) > 2


def test_what_no_option_can_say_is_an_error():
    with pytest.raises(ValueError, match="no option makes level"):
        arguments_of(HutchinsonSettings(level=0.5))


def parsed(app: typer.Typer, command: tuple[str, ...]) -> dict[str, Any]:
    """The options that a command line of a study's step gives, as the command reads them."""
    words = [PLACEHOLDERS.get(word, word) for word in command]
    name, *arguments = words[words.index("-m") + 2 :]
    group: Any = typer.main.get_command(app)
    return group.commands[name].make_context(name, arguments).params


CHANGES: dict[str, BaseModel] = {
    "curvature": CurvatureSettings(pairs=6, dtype="bf16", vectors="host", tolerance=0.125, seed=3),
    "step": PredictionSettings(microbatches=7, checkpointing=True, sequence_length=17),
    "slice": PlaneSettings(grid=9, sequences=5, batch_size=2, extent=0.5),
    "tasks": TasksSettings(
        specs=("rtn-b3-g32",), tasks="piqa,sciq", limit=9, dtype="bf16", task_files=Path("/tasks")
    ),
}


@pytest.fixture(scope="module")
def changed() -> Study:
    study = resolve("tiny", "smoke")
    quantization = study.quantization.model_copy(
        update={"calibration_seeds": 4, "eval_tokens": 44, "block_tokens": 33, "batch_size": 3}
    )
    return study.model_copy(update=CHANGES | {"quantization": quantization})


@pytest.mark.parametrize(
    ("kind", "app"),
    [
        *((kind, curvature_app) for kind in ("curvature", "step", "slice")),
        *((kind, quant_eval_app) for kind in ("quantize", "methods", "tasks")),
    ],
)
def test_the_command_line_says_what_the_study_does(changed, kind, app):
    step = next(step for step in steps_of(changed) if step.kind == kind)
    params = parsed(app, step.command)
    settings = getattr(changed, "quantization" if kind in ("quantize", "methods") else kind)
    options = {name: value for name, value in settings if name in params}
    assert {name: params[name] for name in options} == options
    only_study = {"specs", "along", "methods", "by_block", "block_tokens", "averages", "measure"}
    assert set(dict(settings)) - set(options) <= only_study | {"dtype"}  # fp32 alone, of a step


def test_blocks_are_measured_once_on_fewer_tokens(changed):
    step = next(step for step in steps_of(changed) if step.kind == "blocks")
    params = parsed(quant_eval_app, step.command)
    assert (params["eval_tokens"], params["calibration_seeds"]) == (33, 1)
    assert (params["batch_size"], params["per_block"], params["dense"]) == (3, True, True)
