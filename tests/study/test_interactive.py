"""The report in a browser: every figure drawn from every value, no error, no request, and nothing written can run."""

import csv
from pathlib import Path

import pytest

from study.collect import read_table
from study.report import write_report
from study.settings import Study
from tests.study.chromium import Browser
from tests.study.conftest import HOSTILE
from tests.study.synthetic import table_of
from tests.study.varied import budgets, write_varied

NAMES = [
    *("quantization_error", "kl_divergence", "validation_loss", "averages", "methods", "blocks"),
    *("full_against_quantized", "curvature", "prediction", "slices"),
]


def written(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def browser(tmp_path_factory, report):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        browser.open(report, f"document.body.dataset.drawn === '{len(NAMES)}'")
        yield browser


def test_every_figure_is_drawn_from_what_plotly_knows(browser):
    found = browser.value("Array.from(document.querySelectorAll('figure'), figure => figure.id)")
    assert found == [f"figure-{name}" for name in NAMES]
    panels = {"quantization_error": 2, "validation_loss": 1, "blocks": 3, "prediction": 6, "slices": 4}
    for name in NAMES:
        box = f"document.querySelector('#figure-{name} .plot')"
        assert browser.value(f"{box}.querySelectorAll('.cartesianlayer > .subplot').length") >= panels.get(name, 2)
        assert browser.value(f"{box}.getBoundingClientRect().height") > 300
        assert browser.value(f"document.querySelector('#figure-{name} img').getBoundingClientRect().height") == 0
        wrong = f"(Plotly.validate(page.plots.{name}.data, page.plots.{name}.layout) ?? [])"
        # 'unused' is a known name whose value makes no difference there
        assert browser.value(f"{wrong}.filter(one => one.code !== 'unused').map(one => one.msg)") == []


@pytest.mark.parametrize("name", ["quantization_error", "kl_divergence", "curvature", "methods", "prediction"])
def test_every_value_of_the_table_has_its_mark(browser, report, name):
    """Counted in the page's own vector graphics."""
    rows = [row for row in written(report.parent / f"figures/{name}.csv") if row["series"] != "learning rate"]
    marks = f"document.querySelectorAll('#figure-{name} .cartesianlayer .points path.point').length"
    assert browser.value(marks) == len(rows)


def test_contours_are_filled_and_points_lie_on_them(browser):
    assert browser.value("document.querySelectorAll('#figure-slices .contourfill path').length") > 20
    assert browser.value("document.querySelectorAll('#figure-slices .cartesianlayer path.point').length") == 3 * 4


def test_nothing_goes_wrong_and_nothing_is_asked_for(browser, report):
    assert browser.of("Runtime.exceptionThrown") == []
    assert [
        one for one in browser.of("Runtime.consoleAPICalled") if one["type"] in ("error", "warning", "assert")
    ] == []
    assert [entry["entry"]["text"] for entry in browser.of("Log.entryAdded")] == []
    asked = {one["request"]["url"].partition(",")[0] for one in browser.of("Network.requestWillBeSent")}
    assert asked <= {report.resolve().as_uri(), "data:image/png;base64"}


def test_no_button_sends_data_away(browser):
    titles = browser.value(
        "Array.from(new Set(Array.from(document.querySelectorAll('.modebar-btn'), one => one.dataset.title)))"
    )
    assert sorted(titles) == ["Autoscale", "Download plot as a PNG", "Pan", "Reset axes", "Zoom"]
    assert browser.value("document.querySelectorAll('.modebar a[href]').length") == 0


def test_what_was_written_into_a_study_is_shown_and_never_run(browser):
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('#runs button')[0].textContent") == HOSTILE
    assert browser.value("document.querySelector('.lead').textContent") == HOSTILE
    hover = browser.value("document.querySelector('#figure-methods .plot').data[0].text[0]")
    assert "&lt;img src=x" in hover
    assert "<img" not in hover


def test_a_button_hides_a_run_in_all_figures_and_shows_it_again(browser):
    shown = (
        "Array.from(document.querySelectorAll('.plot'), box => box._fullData.filter("
        "one => one.meta === '0.01' && one.visible === true).length)"
    )
    others = shown.replace("=== '0.01'", "=== '0.03'")
    before, beside = browser.value(shown), browser.value(others)
    assert len(before) == len(NAMES)
    assert min(before) > 0
    button = "document.querySelector('#runs button[data-run=\"0.01\"]')"
    browser.value(f"{button}.click()")
    assert browser.value(shown) == [0] * len(NAMES)
    assert browser.value(others) == beside
    assert browser.value(f"{button}.getAttribute('aria-pressed')") == "false"
    browser.value(f"{button}.click()")
    assert browser.value(shown) == before


def test_under_the_pointer_is_everything_that_is_known_of_a_value(browser, report, study):
    rows = written(report.parent / "figures/kl_divergence.csv")
    place = next(index for index, row in enumerate(rows) if row["run"] == "0.01" and row["step"] == "640")
    text = browser.value(
        "page.plots.kl_divergence.data.find(one => one.meta === '0.01' && one.text?.length).text.at(-1)"
    )
    value = "KL(full || quantized), nats per token"
    low, middle, high = (f"{float(rows[place][value + end]):.4g}" for end in (", low", "", ", high"))
    expected = ["<b>peak learning rate 0.01</b>", "weights", "step: 640", "tokens: 1,310,720", "learning rate: 0"]
    assert text.split("<br>") == [*expected, "phase: anneal", f"{value}: {middle} [{low}, {high}]"]


def test_the_policy_stops_scripts_and_requests(browser):
    """Last, for it leaves entries in the log."""
    add = "(() => {{ const s = document.createElement('script'); {}; document.body.append(s); }})()"
    browser.value(add.format("s.textContent = 'window.hacked = 1'"))
    browser.value(add.format("s.src = 'https://example.com/script.js'"))
    failed = browser.value("fetch('https://example.com/').then(() => 'sent', error => String(error))")
    assert failed.startswith("TypeError")
    assert browser.value("window.hacked") is None
    said = [entry["entry"]["text"] for entry in browser.of("Log.entryAdded")]
    assert sum("Content Security Policy" in text for text in said) >= 3


@pytest.mark.parametrize("figure", ["relative_error", "kl_divergence"])
def test_the_data_beside_a_figure_are_the_tables(report, study, figure):
    name = {"relative_error": "quantization_error"}.get(figure, figure)
    head = {"relative_error": "relative error of the loss", "kl_divergence": "KL(full || quantized), nats per token"}
    rows = [row for row in written(report.parent / f"figures/{name}.csv") if row["series"] == "weights"]
    found = {
        (row["panel"], float(row["learning rate"]), int(row["step"])): [
            float(row[head[figure] + end]) for end in ("", ", low", ", high")
        ]
        for row in rows
    }
    expected = {
        (f"GPTQ, {bits} bits, groups of 32", row["learning_rate"], row["step"]): [
            row[f"quant/gptq-b{bits}-g32/{figure}{end}"] for end in ("", "_low", "_high")
        ]
        for bits in (3, 4)
        for row in read_table(report.parent, study)
        if row["average"] is None
    }
    assert len(rows) == 2 * sum(len(run.save_steps) for run in study.runs)
    assert all(found[place] == values for place, values in expected.items())


def test_the_same_study_makes_the_same_files(tmp_path, study):
    """Byte by byte, pictures and page; of a study that varies a budget, with branches."""
    changed: Study = budgets(study)
    directory = write_varied(tmp_path / changed.name, changed)
    table_of(directory, changed)
    made = []
    for _ in range(2):
        page = write_report(directory, changed).read_bytes()
        made.append({path.name: path.read_bytes() for path in sorted((directory / "figures").iterdir())} | {"": page})
    assert made[0] == made[1]
    assert {Path(name).suffix for name in made[0]} == {"", ".png", ".pdf", ".csv"}
    assert "ends.pdf" in made[0]
