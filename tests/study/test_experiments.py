"""Experiments of a study: a part has the axes, controls and results of its own runs, and a section
of the report.
"""

import csv
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from study.__main__ import report as report_command
from study.definition import Study
from study.design import with_controls
from study.experiments import Experiment
from study.report.report import write_report
from study.results.table import read_table
from tests.study.chromium import Browser
from tests.study.synthetic import draw_nothing, table_of, write_study
from tests.study.test_interactive import POINTS, SETTLED
from tests.study.varied import bare, budgets, weight_decay

BUDGETS = Experiment(
    name="budgets",
    title="Figure 9: budgets",
    runs=("wsd-a", "wsd-b"),
    figures=("kl_divergence", "ends"),
    claims=("surge", "bits"),
    captions={"ends": "Figure 9b of a paper"},
)
TITLES = ("Figure 9: budgets", "Figure 7: weight decay")
DECAYS = Experiment(name="decays", title="Figure 7: weight decay", runs=("wd0", "wd0.3"))


def cooldowns_of(study: Study) -> list[str]:
    return [run.name for run in study.trained if run.name.startswith("wsd")]


def both(study: Study) -> Study:
    """Two studies of the tests in one, of which each is an experiment."""
    of_budgets, of_decays = budgets(study), weight_decay(study)
    cooled = cooldowns_of(of_budgets)
    experiments = (
        BUDGETS.model_copy(update={"runs": tuple(cooled)}),
        DECAYS,
    )
    return bare(
        study,
        name="both",
        runs=(*of_budgets.runs, *with_controls(of_decays.trained)),
        experiments=experiments,
        captions={"ends": "Figure 1 of a paper", "kl_divergence": "Figure 2 of a paper"},
    )


def test_a_part_is_the_study_of_its_runs(study):
    whole = both(study)
    of_budgets, of_decays = map(whole.part, whole.experiments)
    cooled = cooldowns_of(whole)

    # what they leave and are compared with comes with them
    assert [run.name for run in of_budgets.runs] == ["stable", *cooled]
    assert [axis.key for axis in of_budgets.axes] == ["schedule", "tokens"]
    assert [run.name for run in of_decays.runs] == ["wd0", "wd0-control", "wd0.3", "wd0.3-control"]
    assert of_decays.controls == {"wd0-control", "wd0.3-control"}
    assert [axis.key for axis in of_decays.axes] == ["weight_decay"]
    assert {axis.key for axis in whole.axes} == {"schedule", "tokens", "weight_decay"}
    # its captions come before those of the study
    assert of_budgets.captions["ends"] == "Figure 9b of a paper"
    assert of_budgets.captions["kl_divergence"] == "Figure 2 of a paper"
    assert of_decays.captions["ends"] == "Figure 1 of a paper"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ("wd0", "wd9")}, "experiment decays names run wd9, which is not among stable, "),
        ({"name": "budgets"}, "two experiments share a name among budgets, budgets"),
        ({"name": "../decays"}, "experiments.1.name"),
        ({"runs": ()}, "experiments.1.runs"),
    ],
)
def test_what_no_part_can_be_is_refused(study, changes, message):
    whole = both(study)
    wrong = dict(DECAYS) | changes
    content = dict(whole) | {"experiments": (dict(whole.experiments[0]), wrong)}
    with pytest.raises(ValidationError, match=re.escape(message)):
        Study.model_validate(content)


def written_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def written(tmp_path_factory, study) -> tuple[Study, Path]:
    whole = both(study)
    directory = write_study(tmp_path_factory.mktemp("parts") / whole.name, whole)
    table_of(directory, whole)
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        write_report(directory, whole)
    return whole, directory


def test_every_experiment_is_a_section_in_order(written):
    _, directory = written
    page = (directory / "report.html").read_text()
    body = page[page.index("<h1>") : page.index("<script")]
    assert re.findall(r'<section id="([^"]*)">', body) == ["budgets", "decays"]
    for title in TITLES:
        assert body.count(f">{title}</a>") == 2, "contents, and what was found"
    contents, found, *sections = (
        body.index(text) for text in ("<nav>", 'id="found"', '<section id="b', '<section id="d')
    )
    assert [contents, found, *sections] == sorted([contents, found, *sections])
    # the figures and claims that an experiment names, in its order; all of the other
    of_budgets, of_decays = body[sections[0] : sections[1]], body[sections[1] :]
    figures = re.findall(r'<figure id="figure-([^"]*)"', of_budgets)
    assert figures == ["budgets-kl_divergence", "budgets-ends"]
    assert re.findall(r'id="claim-([^"]*)"', of_budgets) == ["budgets-surge", "budgets-bits"]
    assert "Figure 9b of a paper. Quantization at the end" in of_budgets
    assert len(re.findall(r'<figure id="figure-decays-', of_decays)) > 3
    assert len(re.findall(r'id="claim-decays-', of_decays)) > 10
    # what every name refers to is there once
    names = re.findall(r' id="([^"]*)"', body)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]*)"', body)) <= set(names)


def test_files_of_an_experiment_are_in_folders_of_its_name(written):
    _, directory = written
    page = (directory / "report.html").read_text()
    files = re.findall(r'href="((?:figures|tables)/[^"]*)"', page)
    assert {name.split("/")[1] for name in files} == {"budgets", "decays"}
    assert all((directory / name).stat().st_size > 100 for name in files)
    labels = {row["run"] for row in written_rows(directory / "figures/decays/kl_divergence.csv")}
    assert labels == {"0", "0, no anneal", "0.3", "0.3, no anneal", ""}


def test_claims_are_printed_part_by_part(written, capsys):
    _, directory = written
    report_command(directory.name, root=directory.parent, claims=True, every=True)
    printed = capsys.readouterr().out
    first, second = (printed.index(f"== {title}: ") for title in TITLES)
    assert first < second
    assert "Effect of weight decay at the end" not in printed[:second]
    assert "Effect of weight decay at the end" in printed[second:]
    assert printed.count("claim of arXiv 2510.06213 ") == 2


def test_a_part_shows_its_own_rows(written):
    """The error at the end of a run of an experiment is that of the whole table."""
    whole, directory = written
    rows = {
        row["run"]: row["quant/gptq-b3-g32/kl_divergence"]
        for row in read_table(directory, whole)
        if row["run"] in ("wd0", "wd0.3") and row["step"] == 640
    }
    shown = written_rows(directory / "tables/decays/end_of_training.csv")
    column = "GPTQ, 3 bits, groups of 32: KL divergence, 10^-3 nats/token"
    assert {row["weight decay"]: float(row[column]) for row in shown} == pytest.approx(
        {"0": 1000 * rows["wd0"], "0.3": 1000 * rows["wd0.3"]}
    )


def test_a_button_hides_a_run_in_the_figures_of_its_experiment(written, tmp_path):
    _, directory = written
    drawn = (directory / "report.html").read_text().count('<div class="chart" hidden>')

    def marks(experiment: str) -> str:
        return f"document.querySelectorAll('#figure-{experiment}-kl_divergence {POINTS}').length"

    with Browser(tmp_path) as browser:
        browser.open(directory / "report.html", f"document.body.dataset.drawn === '{drawn}'")
        before = {name: browser.value(marks(name)) for name in ("budgets", "decays")}
        assert min(before.values()) > 0
        button = "document.querySelector('#decays .runs button[data-runs*=\"0.3\"]')"
        browser.value(f"{button}.click()")
        assert browser.value(SETTLED)
        after = {name: browser.value(marks(name)) for name in ("budgets", "decays")}
    assert after["budgets"] == before["budgets"]
    assert after["decays"] < before["decays"]
