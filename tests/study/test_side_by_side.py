"""Two studies whose differences are known, side by side."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from study.__main__ import app
from study.collect import write_table
from study.side_by_side import Table, compare, match_rows, match_runs, open_sides
from study.side_by_side_page import text_of, write_page
from tests.study.claimed import SPEC, rows_of, run_of, study_of
from train.command import UserError

RUNS = [run_of(f"peak{index}", peak=1e-3 * 2**index) for index in range(3)]
FIRST = study_of(*RUNS, name="first", methods=("rtn-b3-g32",))
# another weight decay; the last run is another one, and a checkpoint of the first is not there
CHANGED = [
    run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"weight_decay": 0.3})}) for run in RUNS[:2]
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


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    places = []
    for study, error, noise in ((FIRST, first_error, 0.05), (SECOND, second_error, 0.06)):
        directory = tmp_path_factory.mktemp("studies") / study.name
        rows = [{"study": study.name, "peak_lr": 0.0} | row for row in rows_of(directory, study, error, noise=noise)]
        write_table(directory, study, rows)
        places.append(directory)
    return places


@pytest.fixture(scope="module")
def tables(directories) -> dict[str, Table]:
    return {table.title: table for table in compare(*open_sides(*directories))}


def test_settings_that_differ_are_listed_once_for_all_runs_that_match(tables):
    told = {line[:2]: line[2:] for line in tables["Settings that differ"].body}
    assert told["every matched run", "optimizer.weight_decay"] == ("0.1", "0.3")
    assert told["study", "name"] == ('"first"', '"second"')
    assert told["run peak0", "save_steps"] == ("[40, 80, 160, 320, 400]", "[40, 80, 160, 400]")
    assert told["run peak1", "name"] == ('"peak1"', '"renamed"')
    assert not any(key.startswith("model.") for _, key in told)


def test_what_has_no_counterpart_is_listed(tables):
    assert set(tables["Without a counterpart"].body) == {
        ("first", "run", "peak2"),
        ("second", "run", "another"),
        ("first", "quantization", "RTN, 3 bits, groups of 32"),
    }
    matches = match_runs(FIRST, SECOND)
    assert [(match.first.name, match.second.name) for match in matches] == [("peak0", "peak0"), ("peak1", "renamed")]


def kl_of(directory, run: str) -> np.ndarray:
    path = directory / run / "hf/step00000400/quant" / SPEC / "result.json"
    measured = json.loads(path.read_text())["measured"]["per_document"]
    return np.array(measured["kl"]) / np.array(measured["tokens"])


def test_final_figures_are_compared_by_document(directories, tables):
    table = tables["End of training: GPTQ, 3 bits, groups of 32"]
    told = {line[:2]: dict(zip(table.head[2:], line[2:], strict=True)) for line in table.body}
    assert [told["KL divergence", run]["verdict"] for run in ("peak0", "peak1")] == ["higher", "not told apart"]
    assert told["KL divergence", "peak0"]["difference"] == f"{1.1 * 4 * 0.007:+.3g}"
    assert told["relative error", "peak0"]["difference"] == "+0.7%"
    for run, other in (("peak0", "peak0"), ("peak1", "renamed")):  # the same verdicts as another library's paired test
        test = ttest_rel(kl_of(directories[1], other), kl_of(directories[0], run))
        assert (test.pvalue < 0.025) == (run == "peak0")
    assert "Not paired" not in table.note


def test_checkpoints_match_by_tokens(tables):
    table = tables["Along training"]
    assert [line[:4] for line in table.body] == [("peak0", "4", "1", "0"), ("peak1", "5", "0", "0")]
    assert table.body[0][4] == "higher 4, lower 0 of 4"
    rows: list[dict] = [{"tokens": 100, "step": 1}, {"tokens": None, "step": 2}, {"tokens": 300, "step": 3}]
    others: list[dict] = [{"tokens": 100, "step": 5}, {"tokens": 200, "step": 2}, {"tokens": 400, "step": 3}]
    assert match_rows(rows, others) == [(rows[0], others[0]), (rows[1], others[1])]


def test_claims_of_both_stand_beside_each_other(tables):
    told = {line[0]: line[2:] for line in tables["Claims of the paper"].body if line[0]}
    assert told["When the learning rate decays the error surges."] == ("not decided", "not decided")


def test_on_another_text_two_intervals_stand_beside_each_other(directories, tmp_path):
    """By the closed form of two independent estimates; made-up intervals are [0.93, 1.08] times the value."""
    other = rows_of(tmp_path / "second", SECOND, second_error)
    write_table(tmp_path / "second", SECOND, [{"study": "second", "peak_lr": 0.0} | row for row in other])
    for path in (tmp_path / "second").glob("*/hf/*/quant/*/result.json"):
        content = json.loads(path.read_text())
        content["spec"]["evaluation"]["sha256"] = "1" * 64
        path.write_text(json.dumps(content))
    tables = {table.title: table for table in compare(*open_sides(directories[0], tmp_path / "second"))}
    table = tables["End of training: GPTQ, 3 bits, groups of 32"]
    assert "Not paired, two independent intervals: the studies differ in the text." in table.note
    told = {line[:2]: line[4:] for line in table.body}
    one, two = 1.1 * 4 * 0.02, 1.1 * 4 * 0.027
    low = two - one - np.hypot(0.07 * two, 0.08 * one)
    high = two - one + np.hypot(0.08 * two, 0.07 * one)
    assert told["KL divergence", "peak0"] == (f"{two - one:+.3g}", f"[{low:+.3g}, {high:+.3g}]", "", "not paired")
    assert tables["Along training"].body[0][4] == "none measured on the same documents"


def test_what_is_not_measured_is_said(directories, tmp_path):
    rows = [{"study": "second", "peak_lr": 0.0} | row for row in rows_of(tmp_path / "second", SECOND, second_error)]
    for row in rows:
        if row["run"] == "peak0" and row["step"] == 400:
            row[f"quant/{SPEC}/kl_divergence"] = None
    write_table(tmp_path / "second", SECOND, [row for row in rows if row["run"] != "renamed"])
    tables = {table.title: table for table in compare(*open_sides(directories[0], tmp_path / "second"))}
    told = {line[:2]: line[2:4] for line in tables["End of training: GPTQ, 3 bits, groups of 32"].body}
    assert told["KL divergence", "peak0"] == told["loss", "peak1"] == ("measured", "not measured")


class Page(HTMLParser):
    """Tags, and the sources of everything that could be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href")]


def test_the_page_holds_everything_and_loads_nothing(directories, tables, tmp_path):
    sides = open_sides(*directories)
    hostile = Table("<script>x</script>", "a & b", ("<b>",), [("<img src=x>",)])
    write_page(*sides, [*tables.values(), hostile], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert page.tags.count("table") == len(tables) + 1
    assert page.tags.count("img") == 1
    (source,) = page.sources
    assert source is not None
    assert base64.b64decode(source.partition("base64,")[2])[:8] == b"\x89PNG\r\n\x1a\n"
    for cell in ("optimizer.weight_decay", "higher 4, lower 0 of 4"):
        assert cell in text
        assert cell in text_of(list(tables.values()))


def test_the_command_prints_and_writes(directories, tmp_path):
    done = CliRunner().invoke(app, ["compare", *map(str, directories), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert re.search(r"every matched run +optimizer.weight_decay +0.1 +0.3", done.output)
    assert (tmp_path / "page.html").exists()
    said = CliRunner().invoke(app, ["claims", "first", "--root", str(directories[0].parent)])
    assert "Claims of arXiv 2510.06213, by the data of first" in said.output
    with pytest.raises(UserError, match="are one directory"):
        open_sides(directories[0], directories[0])
    with pytest.raises(UserError, match="does not exist"):
        open_sides(directories[0], tmp_path / "nothing")
