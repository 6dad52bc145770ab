"""Two studies whose differences are known, side by side."""

import json
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from base.errors import UserError
from study.__main__ import app
from study.figures.drawn.quantization import kl_divergence
from study.report.side_by_side import both, compare, match_runs, open_sides, text_of, write_page
from study.report.tables import Cell, Table
from study.results.table import Row, schema_of, write_table
from tests.study.claimed import SPEC, rows_of, run_of, study_of

RUNS = [run_of(f"peak{index}", peak=1e-3 * 2**index) for index in range(3)]
FIRST = study_of(*RUNS, name="first", methods=("rtn-b3-g32",))
# another weight decay; the last run is another one, and a checkpoint of the first is not there
CHANGED = [
    run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"weight_decay": 0.3})})
    for run in RUNS[:2]
]
SECOND = study_of(
    CHANGED[0].model_copy(update={"save_steps": (40, 80, 160, 400)}),
    CHANGED[1].model_copy(update={"name": "renamed"}),
    run_of("another", peak=0.5),
    name="second",
    labels={"peak0": "peak0", "renamed": "peak1", "another": "another"},
)


def first_error(run, model) -> float:
    return 0.02


def second_error(run, model) -> float:
    """peak0 costs a third more; what matches peak1 costs the same."""
    return 0.027 if run.name == "peak0" else 0.02


def write_rows(directory, study, rows) -> None:
    columns = {"study": study.name, "peak_lr": 0.0}
    empty = dict.fromkeys(schema_of(study).names)
    write_table(directory, study, [Row.of(empty | columns | row) for row in rows])


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    places = []
    for study, error, noise in ((FIRST, first_error, 0.05), (SECOND, second_error, 0.06)):
        directory = tmp_path_factory.mktemp("studies") / study.name
        write_rows(directory, study, rows_of(directory, study, error, noise=noise))
        places.append(directory)
    return places


@pytest.fixture(scope="module")
def tables(directories) -> list[Table]:
    return compare(*open_sides(*directories))


def texts(table: Table) -> list[tuple[str, ...]]:
    return [tuple(cell.text for cell in line) for line in table.body]


def ends_of(table: Table) -> dict[tuple[str, str], dict[str, str]]:
    """Figure and run -> the line of GPTQ at 3 bits."""
    lines = [dict(zip(table.head, line, strict=True)) for line in texts(table)]
    return {(line["figure"], line["run"]): line for line in lines}


def test_settings_that_differ_are_listed_once_for_all_runs_that_match(tables):
    lines = texts(tables[0])
    assert ("run peak0, run peak1", "optimizer.weight_decay", "0.1", "0.3") in lines
    assert ("study", "name", '"first"', '"second"') in lines
    saved = ("run peak0", "save_steps", "[40, 80, 160, 320, 400]", "[40, 80, 160, 400]")
    assert saved in lines
    assert ("run peak1", "name", '"peak1"', '"renamed"') in lines
    assert not any(key.startswith("model.") for _, key, *_ in lines)


def test_what_has_no_counterpart_is_listed(tables):
    assert "Only in first: peak2. Only in second: another." in tables[1].note
    assert {line[0] for line in texts(tables[1])} == {"GPTQ, 3 bits, groups of 32"}
    matches = match_runs(FIRST, SECOND)
    assert [(match.first.name, match.second.name) for match in matches] == [
        ("peak0", "peak0"),
        ("peak1", "renamed"),
    ]


def kl_of(directory, run: str) -> np.ndarray:
    path = directory / run / "hf/step00000400/quant" / SPEC / "result.json"
    measured = json.loads(path.read_text())["measured"]["per_document"]
    return np.array(measured["kl"]) / np.array(measured["tokens"])


def test_final_figures_are_compared_by_document(directories, tables):
    lines = ends_of(tables[1])
    assert [lines["KL divergence", run]["verdict"] for run in ("peak0", "peak1")] == [
        "higher",
        "no significant difference",
    ]
    assert lines["KL divergence", "peak0"]["difference"] == f"{1.1 * 4 * 0.007:+.3g}"
    assert lines["relative error", "peak0"]["difference"] == "+0.7%"
    for run, other in (("peak0", "peak0"), ("peak1", "renamed")):
        # the same verdicts as another library's paired test
        test = ttest_rel(kl_of(directories[1], other), kl_of(directories[0], run))
        assert (test.pvalue < 0.025) == (run == "peak0")
    assert "Not paired" not in tables[1].note


def test_on_another_text_two_intervals_are_compared(directories, tmp_path):
    """By the closed form of two independent estimates; made-up intervals are [0.93, 1.08] times
    the value.
    """
    other = tmp_path / "second"
    write_rows(other, SECOND, rows_of(other, SECOND, second_error))
    for path in other.glob("*/hf/*/quant/*/result.json"):
        content = json.loads(path.read_text())
        content["spec"]["evaluation"]["sha256"] = "1" * 64
        path.write_text(json.dumps(content))
    _, table = compare(*open_sides(directories[0], other))
    assert "Not paired, two independent intervals: the studies differ in the text." in table.note
    one, two = 1.1 * 4 * 0.02, 1.1 * 4 * 0.027
    low = two - one - np.hypot(0.07 * two, 0.08 * one)
    high = two - one + np.hypot(0.08 * two, 0.07 * one)
    line = ends_of(table)["KL divergence", "peak0"]
    assert line["difference"] == f"{two - one:+.3g}"
    assert line["interval"] == f"[{low:+.3g}, {high:+.3g}]"
    assert (line["p"], line["verdict"]) == ("", "not paired")


def test_what_is_not_measured_is_said(directories, tmp_path):
    other = tmp_path / "second"
    rows = rows_of(other, SECOND, second_error)
    for row in rows:
        if row["run"] == "peak0" and row["step"] == 400:
            row[f"quant/{SPEC}/kl_divergence"] = None
    write_rows(other, SECOND, [row for row in rows if row["run"] != "renamed"])
    _, table = compare(*open_sides(directories[0], other))
    lines = ends_of(table)
    for key in (("KL divergence", "peak0"), ("loss", "peak1")):
        assert lines[key]["first"] != lines[key]["second"] == "not measured"


def test_figures_hold_the_runs_of_both_with_labels_of_their_own(directories):
    canvas = both(*open_sides(*directories))
    looks = canvas.runs.looks
    assert [look.label for look in looks.values()] == [
        *("peak0 (first)", "peak1 (first)", "peak2 (first)"),
        *("peak0 (second)", "peak1 (second)", "another (second)"),
    ]
    pairs = {"peak0": "peak0 (second)", "peak1": "renamed (second)"}
    for name, other in pairs.items():
        assert (looks[name].colour, looks[name].shape) == (looks[other].colour, looks[other].shape)
        assert looks[other].dash
        assert not looks[name].dash
    drawn = kl_divergence.draw(canvas)
    assert drawn is not None
    values = [row for row in drawn.rows if row["series"] == "weights"]
    assert len(values) == len([row for row in canvas.table if row["average"] is None])


def test_the_page_holds_everything_and_nothing_of_it_runs(directories, tables, tmp_path):
    hostile = Table("<script>x</script>", "a & b", ["<b>"], [[Cell("<img src=x>")]])
    write_page(*open_sides(*directories), [*tables, hostile], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<script") == 3, "the charts, Vega, and the page's own"
    assert "<script>x" not in text
    assert text.count("<thead>") == len(tables) + 1
    assert text.count("<figure id=") == 3
    assert "&lt;img src=x&gt;" in text
    assert re.findall(r'<img alt="[^"]*" src="(.{22})', text) == ["data:image/png;base64,"] * 3
    for cell in ("optimizer.weight_decay", "no significant difference"):
        assert cell in text
        assert cell in text_of(tables)


def test_the_command_prints_and_writes(directories, tmp_path):
    done = CliRunner().invoke(app, ["compare", *map(str, directories)])
    assert done.exit_code == 0, done.output
    assert re.search(r"optimizer.weight_decay +0.1 +0.3", done.output)
    root = str(directories[0].parent)
    said = CliRunner().invoke(app, ["report", "first", "--root", root, "--claims"])
    assert "Claims of arXiv 2510.06213, by the data of first" in said.output
    with pytest.raises(UserError, match="are one directory"):
        open_sides(directories[0], directories[0])
    with pytest.raises(UserError, match="does not exist"):
        open_sides(directories[0], tmp_path / "nothing")
