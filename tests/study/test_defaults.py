"""Settings of a study that are options of a command: the same defaults and limits, and obeyed."""

from typing import Any

import pytest
import typer

from curvature.__main__ import app as curvature_app
from curvature.settings import HutchinsonSettings
from dynamics.recipes import resolve
from quant_eval.__main__ import app as quant_eval_app
from quant_eval.settings import RunSettings, TaskSettings
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.measurements.tasks import TasksSettings
from study.pipeline.steps import steps_of

# The option of a field under another name. A study draws several calibration texts by its own rule.
OTHER_NAMES = {"documents": "limit"}
REQUIRED: dict[str, Any] = {
    "pairs": 6,
    "norm_pairs": 3,
    "companion_pairs": 4,
    "microbatch_sequences": 5,
    "step_microbatches": 7,
    "slice_grid": 9,
    "slice_sequences": 8,
}
CHANGED: dict[str, Any] = {
    "fixed_sequences": 11,
    "tolerance": 0.125,
    "max_iterations": 13,
    "sequence_length": 17,
    "dtype": "bf16",
    "vectors": "host",
    "checkpointing": True,
}
PLACEHOLDERS = {"{sharding}": "none", "{device}": "cpu"}


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        (CurvatureSettings, HutchinsonSettings),
        (QuantizationSettings, RunSettings),
        (TasksSettings, TaskSettings),
    ],
)
def test_defaults_and_limits_are_those_of_the_command(settings, command):
    compared = 0
    for name, field in settings.model_fields.items():
        option = command.model_fields.get(OTHER_NAMES.get(name, name))
        if option is None or field.is_required() or name == "tasks":
            continue  # tasks: a command takes 'paper', a study their names
        assert field.default == option.default, name
        assert field.metadata == option.metadata, name
        assert field.annotation == option.annotation, name
        compared += 1
    assert compared >= 1


def parsed(app: typer.Typer, command: tuple[str, ...]) -> dict[str, Any]:
    """The options that a command line of a study's step gives, as the command reads them."""
    words = [PLACEHOLDERS.get(word, word) for word in command]
    name, *arguments = words[words.index("-m") + 2 :]
    group: Any = typer.main.get_command(app)
    return group.commands[name].make_context(name, arguments).params


@pytest.mark.parametrize("changes", [{}, CHANGED, {"lambda_max": False}], ids=str)
def test_the_command_line_says_what_the_study_does(changes):
    curvature = CurvatureSettings(**REQUIRED, **changes)
    study = resolve("tiny", "smoke").model_copy(update={"curvature": curvature})
    steps = {step.kind: step for step in steps_of(study)}
    params = parsed(curvature_app, steps["curvature"].command)
    others = {"averages", "step_microbatches", "slice_grid", "slice_sequences"}
    if not curvature.lambda_max:
        others |= {"fixed_sequences", "tolerance", "max_iterations"}  # of the eigenvalue alone
    for name, value in curvature:
        assert name in others or params[name] == value, name
    step = parsed(curvature_app, steps["step"].command)
    assert (step["microbatches"], step["vectors"]) == (7, curvature.vectors)
    slices = parsed(curvature_app, steps["slice"].command)
    assert (slices["grid"], slices["sequences"]) == (9, 8)


def test_quantization_says_what_the_study_does():
    study = resolve("tiny", "smoke")
    changes = {
        "calibration_draws": 4,
        "calibration_sequences": 33,
        "eval_tokens": 44,
        "dtype": "bf16",
    }
    quantization = study.quantization.model_copy(update=changes)
    steps = steps_of(study.model_copy(update={"quantization": quantization}))
    step = next(step for step in steps if step.kind == "quantize")
    params = parsed(quant_eval_app, step.command)
    assert (params["calibration_seeds"], params["calibration_sequences"]) == (4, 33)
    assert (params["eval_tokens"], params["dtype"]) == (44, "bf16")
