"""The report in a browser: every figure drawn from every value, no error, no request, and
nothing written can run.
"""

import csv
from pathlib import Path

import pytest

from study.definition import Study
from study.figures import figure as drawing
from study.figures.figure import figures_of
from study.report.report import write_report
from study.results.table import read_table
from tests.study.chromium import Browser
from tests.study.conftest import HOSTILE
from tests.study.synthetic import table_of, write_study
from tests.study.varied import budgets

NAMES = [
    *("kl_divergence", "quantization_error", "ends", "losses", "averages"),
    *("full_against_quantized", "curvature", "error_against_curvature"),
    *("methods", "blocks", "prediction"),
]
SETTLED = "Promise.all([...views.values()].flat().map(view => view.runAsync())).then(() => true)"
POINTS = "g.mark-symbol.role-mark path"  # with those of the legend below .role-legend


def written(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def browser(tmp_path_factory, report):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        browser.open(report, f"document.body.dataset.drawn === '{len(NAMES)}'")
        yield browser


def test_every_figure_is_drawn(browser):
    names = browser.value("Array.from(document.querySelectorAll('figure'), figure => figure.id)")
    assert names == [f"figure-{name}" for name in (*NAMES, "slices")]
    for name in NAMES:
        figure = f"document.querySelector('#figure-{name}')"
        assert browser.value(f"{figure}.querySelectorAll('svg.marks').length") == 1
        assert (
            browser.value(f"{figure}.querySelector('svg.marks').getBoundingClientRect().height")
            > 250
        )
        assert browser.value(f"{figure}.querySelector('img').getBoundingClientRect().height") == 0
    picture = "document.querySelector('#figure-slices img').getBoundingClientRect().height"
    assert browser.value(picture) > 250


@pytest.mark.parametrize(
    ("name", "marks"),
    [("quantization_error", 1), ("kl_divergence", 1), ("methods", 1), ("prediction", 2)],
)
def test_every_value_of_the_table_has_its_mark(browser, report, name, marks):
    """Counted in the page's own vector graphics."""
    rows = [
        row
        for row in written(report.parent / f"figures/{name}.csv")
        if row.get("series") != "learning rate"
    ]
    assert browser.value(count_of(name)) == marks * len(rows)


def count_of(name: str) -> str:
    """Count the marks of values of a figure, by JavaScript."""
    return f"document.querySelectorAll('#figure-{name} {POINTS}').length"


def test_a_narrow_page_scrolls_its_tables_and_figures_alone(browser):
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=400,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    assert browser.value("document.documentElement.scrollWidth") <= 400
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_nothing_goes_wrong_and_nothing_is_asked_for(browser, report):
    assert browser.of("Runtime.exceptionThrown") == []
    assert [
        event
        for event in browser.of("Runtime.consoleAPICalled")
        if event["type"] in ("error", "warning", "assert")
    ] == []
    assert [entry["entry"]["text"] for entry in browser.of("Log.entryAdded")] == []
    asked = {
        event["request"]["url"].partition(",")[0]
        for event in browser.of("Network.requestWillBeSent")
    }
    assert asked <= {report.resolve().as_uri(), "data:image/png;base64"}


def test_no_button_sends_data_away(browser):
    actions = "Array.from(document.querySelectorAll('.vega-actions a'), one => one.textContent)"
    assert set(browser.value(actions)) == {"Save as SVG", "Save as PNG"}


def test_what_was_written_into_a_study_is_shown_and_never_run(browser):
    assert browser.value("window.hacked") is None
    assert browser.value("document.querySelectorAll('.runs button')[0].textContent") == HOSTILE
    assert browser.value("document.querySelector('.lead').textContent") == HOSTILE
    legend = (
        "Array.from(document.querySelectorAll('.chart .role-legend text'), one => one.textContent)"
    )
    assert any(text.startswith(HOSTILE[:40]) for text in browser.value(legend)), (
        "cut where it is long"
    )


def test_a_button_hides_a_run_in_all_figures_and_shows_it_again(browser, report):
    before = [browser.value(count_of(name)) for name in NAMES]
    assert min(before) > 0
    button = "document.querySelector('.runs button[data-runs*=\"0.01\"]')"
    browser.value(f"{button}.click()")
    assert browser.value(SETTLED)
    hidden = [browser.value(count_of(name)) for name in NAMES]
    # a quarter of the marks is that of one of the four runs
    assert hidden == [count * 3 // 4 for count in before]
    assert browser.value(f"{button}.getAttribute('aria-pressed')") == "false"
    # An entry of a legend does what its button does.
    entry = "document.querySelectorAll('#figure-kl_divergence .role-legend-label text')[2]"
    click = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    browser.value(f"{entry}.{click}")
    assert browser.value(SETTLED)
    assert [browser.value(count_of(name)) for name in NAMES] == before


def test_under_the_pointer_is_everything_that_is_known_of_a_value(browser, report):
    """The tooltip of a mark lists every column of its row of the table."""
    rows = written(report.parent / "figures/kl_divergence.csv")
    row = next(line for line in rows if line["run"] == "0.01" and line["step"] == "640")
    marks = f"document.querySelectorAll('#figure-kl_divergence {POINTS}')"
    tips = browser.value(f"Array.from({marks}, one => one.__data__.tooltip)")
    tip = next(each for each in tips if (each["run"], each["step"]) == ("0.01", "640"))
    value = "KL divergence, 10^-3 nats/token"
    shown, low, high = (f"{float(row[value + end]):.3g}" for end in ("", ", low", ", high"))
    assert tip["KL divergence, 10⁻³ nats/token"] == f"{shown} [{low}, {high}]"
    assert list(tip)[:3] == ["run", "step", "tokens"]
    facts = {"series": "weights", "tokens": "1,310,720", "learning rate": "0", "phase": "anneal"}
    assert tip.items() >= facts.items()


def test_the_policy_stops_scripts_and_requests(browser):
    """Last, for it leaves entries in the log."""
    add = "(() => {{ const s = document.createElement('script'); {}; document.body.append(s); }})()"
    browser.value(add.format("s.textContent = 'window.hacked = 1'"))
    browser.value(add.format("s.src = 'https://example.com/script.js'"))
    failed = browser.value(
        "fetch('https://example.com/').then(() => 'sent', error => String(error))"
    )
    assert failed.startswith("TypeError")
    assert browser.value("window.hacked") is None
    messages = [entry["entry"]["text"] for entry in browser.of("Log.entryAdded")]
    assert sum("Content Security Policy" in text for text in messages) >= 3


@pytest.mark.parametrize(
    ("name", "figure", "head", "scale"),
    [
        ("quantization_error", "relative_error", "relative error of the loss, %", 100),
        ("kl_divergence", "kl_divergence", "KL divergence, 10^-3 nats/token", 1000),
    ],
)
def test_the_data_beside_a_figure_are_the_tables(report, study, name, figure, head, scale):
    rows = [
        row for row in written(report.parent / f"figures/{name}.csv") if row["series"] == "weights"
    ]
    points = {
        (row["panel"], float(row["learning rate"]), int(row["step"])): [
            float(row[head + end]) for end in ("", ", low", ", high")
        ]
        for row in rows
    }
    expected = {
        (f"GPTQ, {bits} bits, groups of 32", row["learning_rate"], row["step"]): [
            scale * row[f"quant/gptq-b{bits}-g32/{figure}{end}"] for end in ("", "_low", "_high")
        ]
        for bits in (3, 4)
        for row in read_table(report.parent, study)
        if row["average"] is None
    }
    assert len(rows) == 2 * sum(len(run.save_steps) for run in study.runs)
    assert all(points[point] == values for point, values in expected.items())


def test_the_same_study_makes_the_same_files(tmp_path, study, monkeypatch):
    """Byte by byte, page and two pictures; of a study that varies a budget, with branches."""
    two = [figure for figure in figures_of(study) if figure.name in ("ends", "kl_divergence")]
    monkeypatch.setattr(drawing, "figures_of", lambda *_: two)
    changed: Study = budgets(study)
    directory = write_study(tmp_path / changed.name, changed)
    table_of(directory, changed)
    reports = []
    for _ in range(2):
        page = write_report(directory, changed).read_bytes()
        reports.append(
            {path.name: path.read_bytes() for path in sorted((directory / "figures").iterdir())}
            | {"": page}
        )
    assert reports[0] == reports[1]
    assert {Path(name).suffix for name in reports[0]} == {"", ".png", ".pdf", ".svg", ".csv"}
    assert {"ends.pdf", "kl_divergence.pdf"} <= set(reports[0])
