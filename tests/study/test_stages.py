"""Stages of a released model: one training, whose claims, figures and forecasts go over all of them.

The witness is the same training as one stage: the same results under the same tokens.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ckpt_tools.released.revisions import parse_revision
from dynamics.forecast.page import MeasuredStudy
from dynamics.mechanism.checkpoints import checkpoints
from study.definition import Study
from study.figures.canvas import RATE, WEIGHTS, Canvas
from study.figures.charts import Quantity
from study.paths import MeasuredModel, hf_directory, last_model
from study.released import ReleasedRevision, ReleasedRun, ReleasedSoup, is_after_pretraining
from study.results.averages import compared_models
from study.results.collect import collect_rows
from study.results.summary import ends_of_training, lineage, summarize
from study.results.table import Row
from study.tracking.streams import MetricStream, measured_metric, table_stream
from tests.study.claimed import SPEC, outcomes, rows_of, run_of, study_of, table

COLUMN = f"quant/{SPEC}/kl_divergence"
SPLIT = 320  # step at which the second stage begins, its own counted from 0
STEPS = (40, 80, 160, 320, 340, 360, 400)
PER_STEP = 1000  # tokens
RATES = dict(zip(STEPS, (1e-3, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 0.0), strict=True))


def stage_of(step: int) -> str:
    return "stage1" if step <= SPLIT else "stage2"


def place_of(step: int) -> int:
    """The step as its stage counts it."""
    return step if step <= SPLIT else step - SPLIT


def error(run: Any, model: MeasuredModel) -> float:
    """Flat, then a surge in the decay."""
    step = model.step + (SPLIT if run.name == "stage2" else 0)
    return 0.02 + 0.01 * max(0, step - SPLIT) / 80


def measured(directory: Path, *stages: str) -> tuple[Study, list[Any]]:
    """Results of runs with these names, with checkpoints at the steps of their stages."""
    whole = len(stages) == 1
    all_steps = {
        name: tuple(place_of(s) if not whole else s for s in STEPS if whole or stage_of(s) == name)
        for name in stages
    }
    runs = [
        run_of(name, total=steps[-1], start=steps[-1] - 1, save_steps=steps)
        for name, steps in all_steps.items()
    ]
    study = study_of(*runs, controls=False)
    return study, rows_of(directory, study, error)


def release(study: Study, rows: list[Any], *more: ReleasedRun, **second: Any) -> Study:
    """The study with its runs as stages of a released model; completes the rows."""
    runs = []
    for trained in study.trained:
        of_run = [row for row in rows if row["run"] == trained.name]
        before = SPLIT if trained.name == "stage2" else 0
        for row in of_run:
            at = row["step"] + before
            row |= {"tokens": at * PER_STEP, "learning_rate": RATES[at], "phase": trained.name}
        revisions = [
            ReleasedRevision(
                name=f"step{row['step']}",
                **{key: row[key] for key in ("step", "tokens", "learning_rate")},
            )
            for row in of_run
        ]
        chained = second if trained.name == "stage2" else {}
        runs.append(
            ReleasedRun(
                name=trained.name, model="b", source="a/b", revisions=tuple(revisions), **chained
            )
        )
    return study.model_copy(update={"runs": (*runs, *more), "labels": {}})


SOUP = ReleasedRun(
    name="main",
    model="b",
    source="a/b",
    average_of=("stage2",),
    revisions=(ReleasedRevision(name="main", step=80, tokens=400 * PER_STEP),),
)
LONGER = ReleasedRun(
    name="lc",
    model="b",
    source="a/b",
    parent="stage2",
    restarts=True,
    revisions=(
        ReleasedRevision(name="lc-step4", step=4, tokens=404 * PER_STEP, learning_rate=1e-5),
        ReleasedRevision(name="lc-step20", step=20, tokens=420 * PER_STEP, learning_rate=0.0),
    ),
)
SFT = ReleasedRun(
    name="it-SFT",
    model="b",
    source="a/b",
    parent="lc",
    restarts=True,
    revisions=(ReleasedRevision(name="it-SFT"),),
)


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """Two stages, a soup of the second, and what came after pretraining, not measured yet."""
    directory = tmp_path_factory.mktemp("joined")
    study, rows = measured(directory, "stage1", "stage2")
    return directory, release(study, rows, SOUP, LONGER, SFT, parent="stage1"), rows


def test_claims_over_two_stages_are_those_over_one(tmp_path, joined):
    directory, study, rows = joined
    single, rows_of_one = measured(tmp_path, "stage1")
    expected = table(tmp_path, release(single, rows_of_one), rows_of_one)
    judged = table(directory, study, rows)
    for claim in ("flat", "surge", "divergence"):
        assert judged[claim].outcome == expected[claim].outcome != "not tested", claim
        assert judged[claim].p == expected[claim].p
    assert judged["surge"].outcome == "supported"


def test_without_the_stage_before_nothing_is_tested(tmp_path):
    study, rows = measured(tmp_path, "stage1", "stage2")
    verdicts = outcomes(tmp_path, release(study, rows), rows)
    assert verdicts["surge"] == verdicts["flat"] == "not tested"


def test_a_soup_is_no_step_of_training(joined):
    _, study, rows = joined
    soup = dict(rows[-1]) | {"run": "main", "step": 80, "phase": "main"}
    rows = [*rows, soup]
    by_run = {end.run.name: end for end in summarize(study, rows)}
    assert [run.name for run in ends_of_training(study)] == ["stage2", "main", "lc", "it-SFT"]
    assert {name for name, end in by_run.items() if end.anneals} == {"stage2"}
    assert soup not in lineage(study, rows, by_run["it-SFT"].run)
    assert len(lineage(study, rows, by_run["stage2"].run)) == len(STEPS)
    assert soup not in [point.row for point in checkpoints(study, rows, COLUMN)]


def test_figures_have_stages_after_each_other(joined, tmp_path):
    """Joined where one leaves off, their rates as shares of the peak of the whole training."""
    _, study, rows = joined
    canvas = Canvas(study, [Row.of(row) for row in rows], tmp_path)
    assert canvas.tokens.unit == "million"
    line = canvas.along(Quantity("error"), COLUMN, "")
    places = [row[canvas.tokens.label] for row in line]
    assert places == pytest.approx([step * PER_STEP / 1e6 for step in STEPS])
    assert {row["series"] for row in line} == {WEIGHTS}
    (links,) = canvas.links(line, canvas.tokens, Quantity("error"), {})
    ends = [row[canvas.tokens.label] for row in links["data"]["values"]]
    assert ends == pytest.approx([320 * PER_STEP / 1e6, 340 * PER_STEP / 1e6])
    shares = [row[RATE] for row in canvas.rates]
    # That of the second stage begins where the first one ends.
    at = (*STEPS[:4], *STEPS[3:])
    assert shares == pytest.approx([RATES[step] / 1e-3 for step in at])


def test_stages_without_steps_are_joined_in_their_order(joined, tmp_path):
    """it-SFT starts from lc, and another stage from it-SFT, of which no source states a step."""
    _, study, _ = joined
    last = SFT.model_copy(
        update={
            "name": "it-DPO",
            "parent": "it-SFT",
            "revisions": (ReleasedRevision(name="it-DPO"),),
        }
    )
    study = study.model_copy(update={"runs": (*study.runs, last)})
    known = {"study": "b", "average": None, COLUMN: 0.5}
    rows = [
        known | {"run": run.name, "phase": run.stage} | dict(revision)
        for run in study.runs
        for revision in run.revisions
    ]
    canvas = Canvas(study, [Row.of(row) for row in rows], tmp_path)
    places = canvas.along(Quantity("error"), COLUMN, "", has_bars=False)
    (links,) = canvas.links(places, canvas.tokens, Quantity("error"), {})
    joints: dict[str, list[float]] = {name: [] for name in ("stage2", "lc", "it-SFT", "it-DPO")}
    for row in links["data"]["values"]:
        joints[row["run"]].append(row[canvas.tokens.field])
    at = {(row["run"], row["step"]): row[canvas.tokens.field] for row in places}
    assert joints["it-SFT"] == [at["lc", 20], at["it-SFT", None]]
    assert joints["it-DPO"] == [at["it-SFT", None], at["it-DPO", None]]


def test_a_soup_without_a_step_is_beside_the_weights_of_its_stage(joined):
    _, study, _ = joined
    soup = ReleasedSoup(name="mine", members=("lc/lc-step20", "it-SFT/it-SFT"))
    last = SFT.model_copy(update={"soups": (soup,)})
    study = study.model_copy(update={"runs": (*study.runs[:-1], last)})
    rows = [
        Row.of({"run": "it-SFT", "phase": "it-SFT", "average": average})
        for average in (None, "mine")
    ]
    titles = [title for _, title, _ in compared_models(study, rows)]
    assert titles == ["it-SFT", "soup of lc-step20 and it-SFT"]


def test_an_average_of_a_stage_after_pretraining_is_after_it_too():
    """main of Olmo 3 32B is of stage 3, whose tokens are known; that of OLMo 2 7B of stage 2."""
    found = {}
    for repo, names in {
        "allenai/Olmo-3-1125-32B": ("stage1-step1000", "stage3-step1000", "main"),
        "allenai/OLMo-2-1124-7B": ("stage2-ingredient1-step1000-tokens5B", "main"),
    }.items():
        runs = []
        for name in names:
            known = parse_revision(repo, name)
            assert known.tokens
            run = ReleasedRun(
                name=name,
                model="b",
                source=repo,
                restarts=known.restarts,
                average_of=known.average_of,
                revisions=(ReleasedRevision.of(known),),
            )
            runs.append(run)
        found[repo] = [run.name for run in runs if is_after_pretraining(runs, run)]
    assert list(found.values()) == [["stage3-step1000", "main"], []]


def test_a_forecast_starts_from_the_stage_that_holds_the_rate(joined):
    directory, study, rows = joined
    (cooldown,) = MeasuredStudy(study, [Row.of(row) for row in rows], directory).cooldowns(SPEC)
    assert cooldown.tokens == STEPS[3] * PER_STEP
    assert cooldown.tokens_end == 400 * PER_STEP
    assert cooldown.stem.endswith("stage1")


def test_what_no_source_states_is_empty_in_the_table(tmp_path, joined):
    _, study, _ = joined
    run = SFT.model_copy(update={"parent": None})
    alone = study.model_copy(update={"runs": (run,)})
    assert last_model(run) == alone.models_of(run)[0]
    downloaded = tmp_path / hf_directory("it-SFT", last_model(run)) / "download.json"
    downloaded.parent.mkdir(parents=True)
    downloaded.touch()
    (row,) = collect_rows(tmp_path, alone).rows
    assert (row["step"], row["tokens"], row["learning_rate"]) == (None, None, None)

    # MLflow, which takes no metric without a step, has it at 0
    known = Row.of({**row, COLUMN: 0.5})
    (metrics,) = table_stream([known], MetricStream([], [])).metrics
    known_as, _ = measured_metric(COLUMN) or ("", 0)
    assert {(metric.key, metric.step) for metric in metrics} >= {(known_as, 0)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parent": "stage0"}, "starts from stage0, which is not a stage before it"),
        ({"parent": "stage1", "average_of": ("x",)}, "is an average; it starts from no stage"),
        ({"revisions": SOUP.revisions + SFT.revisions}, "the steps of stage2 do not rise"),
    ],
)
def test_stages_that_do_not_fit_are_refused(joined, changes, reason):
    study = joined[1]
    content = study.model_dump(mode="json")
    second = ReleasedRun.model_validate(content["runs"][1]).model_copy(update=changes)
    content["runs"][1] = second.model_dump(mode="json")
    with pytest.raises(ValidationError, match=reason):
        Study.model_validate(content)
