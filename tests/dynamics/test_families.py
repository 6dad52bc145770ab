"""Released models whose truth is known: figures and claims of families that were made up.

Their revisions have the names of OLMo 2 and SmolLM3, their tokens are counted by hand, and their
errors are planted: flat while the rate is high, then a surge in the anneal, soups in between; or
the opposite, growth with the tokens alone.
"""

import csv
import json
import random
import shutil
from collections.abc import Callable
from math import log2
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import vl_convert

from base.errors import UserError
from dynamics.across import write_comparison
from dynamics.figures.averages import averages
from dynamics.figures.losses import full_against_quantized, losses
from dynamics.figures.quantization import quantization_error
from dynamics.figures.sharpness import sharpness
from dynamics.forecast.page import MeasuredStudy
from study.definition import Study, save_study
from study.figures.canvas import AFTER, WEIGHTS, Canvas
from study.figures.charts import PLACE
from study.figures.figure import write_figure
from study.figures.looks import SOUP, STAR
from study.measurements.critical import OF_MOVE
from study.measurements.curvature import TRACE
from study.released import ReleasedRevision, ReleasedRun
from study.results.averages import LAWA
from study.results.table import Row, read_table, write_table
from study.steps import steps_of
from tests.dynamics.drawing import chart_of, drawn
from tests.dynamics.families import (
    OLMO2,
    PER_STEP,
    POST_TRAINING,
    STAGE1_STEPS,
    lay_out,
    of_the_authors,
    olmo2,
    study_of,
    tokens_of,
)
from tests.dynamics.made_up import made_up
from tests.quant_eval.models import random_model, token_file
from tests.study.claimed import plant, table
from tests.study.running import run_steps
from tests.study.synthetic import text_in_place
from tests.study.test_legends import legend_of

Planted = Callable[[ReleasedRun, ReleasedRevision], float]
FLAT, SURGE, SOUP_ERROR = 0.02, 0.05, 0.035
TOKENS = "training tokens, billion"
ERROR = "relative error of the loss, %"
CHECKPOINTS, FINAL = "SmolLM3-3B-checkpoints", "SmolLM3-3B"


def annealed(run: ReleasedRun, revision: ReleasedRevision) -> float:
    """Share of the decay that is over: by the steps of OLMo 2's anneals, by SmolLM3's rate."""
    if run.stage.startswith("stage2-ingredient"):
        assert revision.step is not None
        return revision.step / (run.total_steps or 1)
    return 1 - (revision.learning_rate or 0) / 2e-4 if run.stage == "stage3" else 0.0


def surging(run: ReleasedRun, revision: ReleasedRevision) -> float:
    if run.average_of:
        return SOUP_ERROR
    return FLAT + (SURGE - FLAT) * annealed(run, revision)


def falling_loss(run: ReleasedRun, revision: ReleasedRevision) -> float:
    """A trend in log tokens, and more in the anneal."""
    trend = 4.0 - 0.05 * log2((revision.tokens or 1e13) / 1e9)
    return trend - 0.1 * annealed(run, revision)


def growing(run: ReleasedRun, revision: ReleasedRevision) -> float:
    """A trend in log tokens from the start, which the anneal lowers."""
    return 0.01 + 0.004 * log2((revision.tokens or 1e13) / 1e10) - 0.01 * annealed(run, revision)


def power_law(run: ReleasedRun, revision: ReleasedRevision) -> float:
    """Tokens alone, as in arXiv 2411.04330; other models have other exponents."""
    exponent = 0.1 + 0.1 * OLMO2.index(run.model)
    return 0.01 * ((revision.tokens or 1e13) / 1e11) ** exponent


@pytest.fixture
def several(tmp_path, tokenizer_dir) -> Study:
    return study_of(*(lay_out(tmp_path, name, olmo2(name), tokenizer_dir) for name in OLMO2))


@pytest.fixture
def smollm3(tmp_path, tokenizer_dir) -> Study:
    revisions = [*of_the_authors(CHECKPOINTS), "stage3-step-4720000", *POST_TRAINING]
    first = lay_out(tmp_path, CHECKPOINTS, revisions, tokenizer_dir)
    return study_of(first, lay_out(tmp_path, FINAL, ["main"], tokenizer_dir))


def test_the_size_of_a_release_is_compared_with_its_tokens_of_pretraining(tmp_path, smollm3):
    write_table(tmp_path / "planted", smollm3, plant(tmp_path / "planted", smollm3, surging))
    lines = list(write_comparison({tmp_path / "planted": smollm3}, tmp_path / "out"))
    assert lines[0].startswith("no scaling law of any error: 1 of 3 sizes")
    ends = pq.read_table(tmp_path / "out/ends.parquet").to_pylist()
    placed, *after = ends
    assert placed["run"] == "stage3"
    assert placed["tokens_per_parameter"] == placed["tokens"] / placed["parameters"]
    assert after
    assert {end["parameters"] for end in after} == {None}


def revision_of(study: Study, row: dict) -> tuple[str, str]:
    """Model and name of the revision of a row of a figure."""
    run = next(run for run in study.runs if study.label_of(run) == row["run"])
    assert isinstance(run, ReleasedRun)
    (revision,) = (each for each in run.revisions if each.step == row["step"])
    return run.model, revision.name


def figure(tmp_path: Path, study: Study, rows: list[Row]) -> tuple[list[dict], dict]:
    """The rows of the error at 3 bits, and the chart."""
    drawing = drawn(quantization_error, Canvas(study, rows, tmp_path))
    first = drawing.rows[0]["panel"]
    return [row for row in drawing.rows if row["panel"] == first], chart_of(drawing)


def test_four_models_are_lineages_with_every_point_at_its_tokens(tmp_path, several):
    rows = plant(tmp_path / "planted", several, surging)
    assert several.heading == "model and stage"
    drawn_rows, chart = figure(tmp_path, several, rows)
    assert len(drawn_rows) == sum(len(olmo2(name)) - (name == OLMO2[0]) for name in OLMO2)
    stars = []
    for row in drawn_rows:
        name, revision = revision_of(several, row)
        if revision == "main":
            stars.append((name, row[TOKENS], row[ERROR]))
            continue
        assert row[TOKENS] == pytest.approx(tokens_of(name, revision) / 1e9, rel=1e-12)
        anneal = "stage2" in revision
        assert (row[ERROR] > 100 * FLAT * 1.0001) == anneal, revision

    # A soup is at the end of its longest anneal: 50B tokens at 7B, 300B at 13B and 32B.
    last = {OLMO2[1]: 11_931, OLMO2[2]: 35_773, OLMO2[3]: 35_763}
    assert stars == [
        (name, pytest.approx((STAGE1_STEPS[name] + step) * PER_STEP[name] / 1e9), pytest.approx(100 * SOUP_ERROR))
        for name, step in last.items()
    ]  # fmt: skip
    assert legend_of(chart) == {*OLMO2, SOUP}


def test_a_model_has_one_colour_its_anneals_are_thin_and_its_soup_is_a_star(tmp_path, several):
    canvas = Canvas(several, [], tmp_path)
    looks = canvas.runs.looks
    by_model = {
        name: [looks[run.name] for run in several.runs if run.model == name] for name in OLMO2
    }
    colours = {name: {look.colour for look in of_model} for name, of_model in by_model.items()}
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == len(OLMO2)
    stars = {run.name for run in several.runs if looks[run.name].shape == STAR}
    assert stars == {f"{name}-main" for name in OLMO2[1:]}  # that of the 1B is its last ingredient
    thin = {run.stage.partition("-")[0] for run in several.runs if looks[run.name].is_thin}
    assert thin == {"stage2"}


PLANTED: dict[Planted, dict[str, bool | None]] = {
    surging: {"flat": True, "surge": True, "divergence": True, "tokens": False},
    growing: {"flat": False, "surge": False, "divergence": False},
    power_law: {"tokens": True, "surge": None, "divergence": None},  # None: not decided
}


@pytest.mark.parametrize("error", PLANTED)
def test_claims_return_what_was_planted(tmp_path, several, error):
    rows = plant(tmp_path / "planted", several, error, loss=falling_loss)
    judged = table(tmp_path / "planted", several, rows)
    for claim, holds in PLANTED[error].items():
        expected = {True: "supported", False: "contradicted", None: "not decided"}[holds]
        assert judged[claim].outcome == expected, claim
    # The unit is the model, not its anneals.
    assert "of 4 " in judged["surge"].details[0].runs


def test_sharpening_without_controls_says_that_tokens_are_in_it(tmp_path, several):
    """Curvature that grows with the tokens alone rises in the decay, too."""
    planted = plant(tmp_path / "planted", several, surging)
    rows = [Row.of(dict(row) | {TRACE.name: 1e-9 * (row["tokens"] or 0)}) for row in planted]
    judged = table(tmp_path / "planted", several, rows)
    of_trace = judged["sharpening"].details[0].statistic
    assert (
        "the weights before the decay, so that what the tokens since then did is in it" in of_trace
    )


@pytest.mark.parametrize("error", [surging, growing])
def test_smollm3_from_pretraining_to_the_merge(tmp_path, smollm3, error):
    rows = plant(tmp_path / "planted", smollm3, error, loss=falling_loss)
    judged = table(tmp_path / "planted", smollm3, rows)
    expected = "supported" if error is surging else "contradicted"
    assert {judged[name].outcome for name in ("flat", "surge", "divergence")} == {expected}

    drawn_rows, chart = figure(tmp_path, smollm3, rows)
    placed = {run: row for row in drawn_rows if (run := row["run"]) and AFTER in row}
    order = ["lc-4k-to-32k", "lc-32k-to-64k", "it-mid-training", "it-SFT", "it-soup-APO"]
    assert list(placed) == [*order, "it-LC-expert", "main"]
    assert [row[AFTER] for row in placed.values()] == list(range(1, 8))
    assert all(row[TOKENS] is None for row in placed.values())
    places = [row[PLACE] for row in drawn_rows if AFTER in row]
    end = 4_720_000 * PER_STEP[CHECKPOINTS] / 1e9
    assert places == sorted(places)
    assert min(places) > 1.02 * end
    assert max(row[TOKENS] for row in drawn_rows if AFTER not in row) == pytest.approx(end)
    words = json.dumps(chart)
    assert all(f'"name": "{name}"' in words for name in placed)


def test_the_file_of_a_figure_has_no_tokens_after_pretraining(tmp_path, smollm3):
    rows = plant(tmp_path / "planted", smollm3, surging)
    drawing = drawn(quantization_error, Canvas(smollm3, rows, tmp_path))
    write_figure(drawing, tmp_path / "figure")
    with (tmp_path / "figure.csv").open() as file:
        written = list(csv.DictReader(file))
    assert PLACE not in written[0]
    sft = [row for row in written if row["run"] == "it-SFT"]
    assert {(row[TOKENS], row["tokens"], row[AFTER]) for row in sft} == {("", "", "4")}
    first = next(row for row in written if row["run"] == "stage1")
    assert (first[AFTER], first["tokens"]) == ("", str(40_000 * 2_359_296))


def test_critical_sharpness_has_its_places_after_pretraining_too(tmp_path, smollm3):
    """Those of curvature along the same moves."""
    curvature, _, critical, multiple, not_above, above, _ = (column.name for column in OF_MOVE)
    moved = {curvature: 1e-3, critical: 1.0, multiple: -2.0, not_above: 1.9, above: 2.1}
    for name in (curvature, critical):
        moved |= {f"{name}_low": 0.9 * moved[name], f"{name}_high": 1.1 * moved[name]}
    rows = [Row.of(dict(row) | moved) for row in made_up(smollm3)]
    shown = drawn(sharpness, Canvas(smollm3, rows, tmp_path)).rows
    along, over = (
        [(row["run"], row["step"], row[PLACE]) for row in shown if row.get("panel") == panel]
        for panel in ("Curvature along the move", "Critical sharpness along the move")
    )
    assert over == along
    assert {"lc-4k-to-32k", "lc-32k-to-64k"} <= {run for run, _, _ in over}


def test_few_public_checkpoints_leave_something_open(tmp_path, tokenizer_dir):
    """Authors' lists: at the high rate 3 checkpoints of the 1B, 2 of the 7B, one of others."""
    places = [lay_out(tmp_path, name, olmo2(name, early=False), tokenizer_dir) for name in OLMO2]
    study = study_of(*places)
    rows = plant(tmp_path / "planted", study, surging, loss=falling_loss)
    judged = table(tmp_path / "planted", study, rows)
    for claim in ("flat", "surge", "divergence"):
        (sentence,) = (
            part
            for part in judged[claim].details[0].statistic.split("; ")
            if "it stays open" in part
        )
        assert sentence.endswith(
            "OLMo-2-1124-7B has 2 and 21, OLMo-2-1124-13B has 1 and 10 and is left out,"
            " OLMo-2-0325-32B has 1 and 14 and is left out"
        )
        assert judged[claim].details[0].runs.startswith("2 of 2")


def test_anneals_of_one_model_teach_each_other_nothing(tmp_path, several):
    """A back test leaves out a group whole: to forecast one ingredient, not another is used."""
    directory = tmp_path / "planted"
    rows = plant(directory, several, surging)
    cooldowns = MeasuredStudy(several, rows, directory).cooldowns("gptq-b3-g32")
    # of the authors' ingredients: 3 of the 1B and 7B, 4 of the 13B, 2 of the 32B
    assert [each.group.rpartition(": ")[2] for each in cooldowns] == [
        *3 * [OLMO2[0]], *3 * [OLMO2[1]], *4 * [OLMO2[2]], *2 * [OLMO2[3]],
    ]  # fmt: skip


def test_other_tokenizers_are_refused_whatever_their_names(tmp_path, tokenizer_dir):
    first, second = (lay_out(tmp_path, name, olmo2(name), tokenizer_dir) for name in OLMO2[:2])
    path = second / "main" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match=r"has another tokenizer than .*; make a study of each"):
        study_of(first, second)
    path.unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json at main"):
        study_of(first, second)
    with pytest.raises(UserError, match="2 times; name it once"):
        study_of(first, first)


def test_a_tooltip_shows_no_number_where_none_is_known(tmp_path, smollm3):
    """Vega formats a missing number as 0: the step and tokens of it-SFT are in no source."""
    rows = plant(tmp_path / "planted", smollm3, surging)
    _, chart = figure(tmp_path, smollm3, rows)
    compiled = json.dumps(vl_convert.vegalite_to_vega(json.dumps(chart)))
    for column in ("tokens", "step", "learning rate", TOKENS):
        assert f'format(datum[\\"{column}\\"]' not in compiled
        assert f"isValid(datum['{column}']) ? format(datum['{column}']" in compiled


SCALES = {0.0: 1.0, 0.5: 4.0, 1.0: 16.0}  # of outliers, by how much of the surge is planted
HALF = 0.5  # of the surge, in a soup


def surge_planted(run: ReleasedRun, revision: ReleasedRevision) -> float:
    return HALF if run.average_of else float(revision.learning_rate == 0)


def write_weights(directory: Path, surge: float, seed: int, tokenizer: Path) -> None:
    """A random model whose down projections have outliers of input channels, taken back exactly in
    the up projections before them: the same function, and coarser grids.
    """
    model = random_model("olmo2")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():  # no two revisions are alike
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[:, ::16] *= SCALES[surge]
            layer.mlp.up_proj.weight[::16] /= SCALES[surge]
        model.lm_head.weight *= 4
    shutil.rmtree(directory)
    model.save_pretrained(directory)
    shutil.copy(tokenizer / "tokenizer.json", directory)


LADDER = {
    OLMO2[1]: [
        *(f"stage1-step{step}-tokens{tokens}B" for step, tokens in
          ((10_000, 42), (20_000, 84), (40_000, 168), (722_000, 3029))),
        *("stage2-ingredient1-step11931-tokens50B", "stage2-ingredient3-step11931-tokens50B", "main"),
    ],
    OLMO2[2]: [
        *(f"stage1-step{step}-tokens{tokens}B" for step, tokens in
          ((8000, 68), (16_000, 135), (32_000, 269), (435_000, 3650))),
        *("stage2-ingredient1-step11931-tokens100B", "stage2-ingredient4-step35773-tokens300B", "main"),
    ],
}  # fmt: skip


@pytest.mark.stress
def test_planted_weights_are_measured_as_planted(tmp_path, tokenizer_dir):
    """The study's own steps on real models: copied, quantized, collected."""
    places = [lay_out(tmp_path, name, names, tokenizer_dir) for name, names in LADDER.items()]
    study = study_of(*places)
    for place in places:
        for run in study.runs:
            assert isinstance(run, ReleasedRun)
            for seed, revision in enumerate(run.revisions):
                if run.source == str(place):
                    planted = surge_planted(run, revision)
                    write_weights(place / revision.name, planted, seed, tokenizer_dir)

    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefgh ", k=400)) for _ in range(160)]
    held_out, calibration = (
        token_file(tmp_path / use / use, share, tokenizer_dir)
        for use, share in (("held_out", texts[:80]), ("calibration", texts[80:]))
    )
    text = text_in_place(held_out=held_out, calibration=calibration, tokenizer=tokenizer_dir)
    small = {"specs": ("rtn-b3-g32",), "methods": (), "calibration_sequences": 8}
    quantization = study.quantization.model_copy(update=small)
    alone = {"quantization": quantization, "curvature": None, "critical": None}
    study = study.model_copy(update={"text": text} | alone)
    directory = tmp_path / "runs" / study.name
    save_study(directory, study)
    wanted = ("download", "quantize", "collect")
    run_steps(directory, [step for step in steps_of(study) if step.kind in wanted], workers=2)

    rows = read_table(directory, study)
    divergence = {(row["run"], row["step"]): row["quant/rtn-b3-g32/kl_divergence"] for row in rows}
    by_surge: dict[float, list[float]] = {surge: [] for surge in SCALES}
    for run in study.runs:
        assert isinstance(run, ReleasedRun)
        for revision in run.revisions:
            by_surge[surge_planted(run, revision)].append(divergence[run.name, revision.step])
    assert max(by_surge[0.0]) < min(by_surge[HALF])
    assert max(by_surge[HALF]) < min(by_surge[1.0])
    judged = table(directory, study, rows)
    assert judged["flat"].outcome == judged["surge"].outcome == "supported"
    stars = figure(tmp_path, study, rows)[0]
    assert sum(revision_of(study, row)[1] == "main" for row in stars) == 2


def test_averages_after_pretraining_are_at_the_revisions_that_they_end_with(tmp_path, smollm3):
    """Those of context extension have no tokens, which the axes of losses look for."""
    long_context = [run for run in smollm3.runs if run.name.endswith("lc-4k-to-32k")]
    assert [len(run.revisions) for run in long_context] == [2]
    runs = [
        run.model_copy(update={"windows": (2,)}) if len(run.revisions) > 1 else run
        for run in smollm3.runs
    ]
    study = Study.model_validate(dict(smollm3) | {"runs": tuple(runs)})
    rows = drawn(averages, Canvas(study, made_up(study), tmp_path)).rows
    label = study.label_of(
        study.runs[[run.name for run in smollm3.runs].index(long_context[0].name)]
    )
    of_stage = [row for row in rows if row["run"] == label and row["panel"] == rows[0]["panel"]]
    places = {(row["series"], row["step"]): row[PLACE] for row in of_stage}
    assert places[LAWA, 20_000] == places[WEIGHTS, 20_000] > places[WEIGHTS, 4000]
    for figure in (losses, full_against_quantized):
        assert drawn(figure, Canvas(study, made_up(study), tmp_path)).rows
