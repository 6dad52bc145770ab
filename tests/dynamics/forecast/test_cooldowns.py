"""Cooldowns as a study's table holds them, and the command that forecasts from them."""

import json
import math

import pytest
from typer.testing import CliRunner

from dynamics.forecast.cooldowns import Source
from dynamics.forecast.miniature import is_miniature, miniature, miniature_of
from dynamics.recipes.parts import annealed
from study.__main__ import app
from study.paths import MeasuredModel, quantization_result
from tests.present import present
from tests.sealing import reseal
from tests.study.ablation import tiny
from tests.study.claimed import SPEC, branched, rows_of, run_of, study_of
from tests.study.synthetic import change_losses, write_study

ONE, TWO = run_of("one"), run_of("two", peak=3e-3)
MINIATURE = miniature(ONE, 320)
STUDY = study_of(
    ONE,
    TWO,
    MINIATURE,
    curvature=True,
    controls=False,
    labels={run.name: run.name for run in (ONE, TWO, MINIATURE)},
)


def error(run, model) -> float:
    """Grows as the root of the step, by half in the anneal, by a tenth in a miniature one."""
    factor = 1.5 if model.step == 400 else 1.1 if is_miniature(run) else 1.0
    return 0.01 * factor * math.sqrt(model.step)


@pytest.fixture
def source(tmp_path):
    """The study's table without noise; the trace grows with the step."""
    trace = lambda run, model: 3.0 * model.step  # noqa: E731
    rows = rows_of(tmp_path, STUDY, error, noise=0.0, trace=trace)
    for row in rows:
        row["peak_lr"] = {"two": 3e-3}.get(row["run"], 1e-3)
    return Source(STUDY, rows, tmp_path)


def test_a_miniature_cooldown_takes_one_percent_of_the_steps():
    assert (present(MINIATURE.branch_from).step, MINIATURE.total_steps) == (320, 323)
    assert is_miniature(MINIATURE)
    assert not is_miniature(ONE), "an anneal in place"
    assert not is_miniature(branched(ONE, 160, 80)), "half of the steps"
    assert not is_miniature(annealed(ONE, "longer", start=320, save_steps=(324,)))
    assert miniature_of(STUDY.trained, "one", 320) == MINIATURE
    assert miniature_of(STUDY.trained, "one", 160) is None
    assert miniature_of(STUDY.trained, "two", 320) is None


def test_cooldowns_hold_what_was_measured_by_their_start(source):
    first, second = source.cooldowns(SPEC)
    assert [first.label, second.label] == ["tiny: one", "tiny: two"]
    per_step = ONE.tokens_per_step
    assert [tokens / per_step for tokens, _ in first.past] == [40, 80, 160, 320]
    assert first.exponent == pytest.approx(0.5)
    assert first.growth == pytest.approx(math.log(400 / 320))
    assert math.log(first.error_end) - first.log_error == pytest.approx(math.log(1.5 * 1.25**0.5))
    shared = {"trace": pytest.approx(math.log(8))}
    reacts = math.log(1.1 * math.sqrt(323 / 320))
    assert first.signals == shared | {"learning rate": 0.0, "error": pytest.approx(reacts)}
    assert second.signals == shared | {"learning rate": pytest.approx(math.log(3))}


def test_the_layer_output_error_is_that_of_the_miniature_over_the_start(source):
    for name, step, errors in (("one", 320, [0.1, 0.3]), (MINIATURE.name, 323, [0.3, 0.7])):
        path = source.directory / quantization_result(name, MeasuredModel(step), SPEC)
        content = json.loads(path.read_text())
        content["measured"]["layers"] = [
            {"name": f"linear{place}", "relative_output_error": value}
            for place, value in enumerate(errors)
        ]
        reseal(path, content)
    (first, _) = source.cooldowns(SPEC)
    assert first.signals["layer output error"] == pytest.approx(math.log(0.5 / 0.2))


def test_a_start_knows_nothing_of_later_steps(source):
    """Errors and traces after step 160, the end included, leave the cooldown at 160 as it is."""
    start = next(row for row in source.rows if (row["run"], row["step"]) == ("one", 160))
    before = source.at(ONE, start, SPEC)
    for row in source.rows:
        if row["step"] > 160:
            row[f"quant/{SPEC}/kl_divergence"] *= 9
            row["curvature/trace"] *= 9
    assert source.at(ONE, start, SPEC) == before


def command(root, *words: str):
    return CliRunner().invoke(app, ["forecast", *words, "--root", str(root)])


@pytest.fixture
def root(tmp_path):
    """Studies of two peaks and of one, each with results of every checkpoint."""
    whole = tiny()
    quantization = whole.quantization.model_copy(update={"methods": (), "by_block": ()})
    for name, runs in (("both", whole.runs[:2]), ("single", whole.runs[2:3])):
        update = {"name": name, "runs": runs, "quantization": quantization, "soups": ()}
        write_study(tmp_path / name, whole.model_copy(update=update))
    return tmp_path


def test_the_command_says_what_each_model_forecasts(root):
    """Two runs learn from each other: one cooldown fits no interval of a ratio."""
    lines = command(root, "both", "--run", "lr1e-3").stdout.splitlines()
    assert lines[0].endswith("(lr1e-3)")
    three, four = (place for place, line in enumerate(lines) if "KL divergence" in line)
    assert "at step 448 (917,504 tokens); if annealed from there to 1,310,720" in lines[three]
    assert "by cooldowns of other runs: 1, in groups of seeds: 1" in lines[three]
    names = [line.split("  ")[2] for line in lines[three + 1 : three + 3]]
    assert names == ["persistence", "power law in tokens"]
    assert all("90% interval [" in line for line in lines[three + 1 : three + 3])
    assert lines[three + 3].startswith("    no forecast by mean ratio; tokens and miniature")
    assert "LAWA" in lines[four - 1]
    assert "measured at step 448, no forecast" in lines[four - 1]


def test_other_studies_teach_and_a_lone_run_has_baselines_alone(root):
    alone = command(root, "single").stdout
    assert "by no cooldown of another run (--from names studies that have some)" in alone
    assert "90% interval" not in alone
    taught = command(root, "single", "--from", "both").stdout
    assert "by cooldowns of other runs: 2, in groups of seeds: 2" in taught
    assert "    mean ratio   " in taught


def test_the_end_of_the_forecast_run_changes_nothing(root):
    before = command(root, "both", "--run", "lr1e-3").stdout
    for spec in ("gptq-b3-g32", "gptq-b4-g32"):
        change_losses(root / "both", "lr1e-3", spec, kl=[0.5 * n for n in range(1, 29)])
    assert command(root, "both", "--run", "lr1e-3").stdout == before


def test_a_run_that_is_not_there_is_refused(root):
    result = command(root, "both", "--run", "lr9")
    assert str(result.exception) == "both has no run lr9; take one of lr1e-3, lr3e-3"
