"""The report: complete, self-contained, and claiming no more than the intervals allow."""

import base64
import io
from html.parser import HTMLParser

import pytest
from PIL import Image

from study.averages import average_findings
from study.collect import collect_rows, read_table, write_table
from study.recipes import resolve
from study.report import write_report
from study.summary import Estimate, RunSummary, anneal_finding, findings, loss_finding, order_finding, summarize
from tests.study.synthetic import write_study


class Page(HTMLParser):
    """Collects references, tags, table cells and preformatted text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.code = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("td", "th", "pre"):
            self._inside = tag

    def handle_endtag(self, tag):
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data):
        if self._inside == "pre":
            self.code += data
        elif self._inside:
            self.rows[-1][-1] += data


@pytest.fixture
def page(collected_dir, study) -> Page:
    return Page(write_report(collected_dir, study).read_text())


def test_it_needs_nothing_but_itself(page):
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert len(page.references) == 5
    for reference in page.references:
        kind, _, data = reference.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.width > 800


def test_a_row_per_learning_rate_with_intervals(page, study):
    rows = {row[0]: row[1:] for row in page.rows if len(row) == 1 + 1 + 2 * 2}
    for run in study.runs:
        assert all("[" in cell for cell in rows[f"{run.optimizer.peak_lr:g}"])
    # the synthetic error is 0.02 x the share of the anneal's formula: 2 % x 1.6 x 1.0 at the end of the lowest peak
    assert rows["0.001"][2].startswith("3.20 %")


def test_averages_stand_beside_the_weights_of_their_step(page, study):
    rows = [row for row in page.rows if len(row) == 1 + 1 + 1 + 2 * 3 and row[0] == "0.01"]
    title = "LAWA, 5 weights 16 steps apart"
    assert [row[1] for row in rows] == ["step 448, before the anneal", title, "step 640, annealed", title]
    for weights, average in (rows[:2], rows[2:]):
        # synthetic averages: a loss 0.08 lower and an error 0.6 times as large
        (loss, error), (averaged_loss, averaged_error) = (
            [float(row[column].split("[")[0].rstrip(" %")) for column in (2, 4)] for row in (weights, average)
        )
        assert loss - averaged_loss == pytest.approx(0.08, abs=2e-3)
        assert averaged_error / error == pytest.approx(0.6, abs=0.01)
        assert all("[" in cell for cell in (*weights[2:], *average[2:]))


def test_what_is_said_of_averages_comes_from_intervals_that_lie_apart(collected_dir, study):
    rows = read_table(collected_dir, study)
    column = "quant/gptq-b3-g32/kl_divergence"

    def place(run, *, low, high):
        row = next(row for row in rows if (row["run"], row["step"], row["average"]) == (run, 448, "lawa5x16"))
        row |= {f"{column}_low": low, column: (low + high) / 2, f"{column}_high": high}

    annealed = {row["run"]: row[column] for row in rows if row["step"] == 640 and row["average"] is None}
    place("lr1e-3", low=annealed["lr1e-3"] * 2, high=annealed["lr1e-3"] * 3)
    place("lr3e-3", low=annealed["lr3e-3"] * 0.5, high=annealed["lr3e-3"] * 2)
    (sentence,) = average_findings(study, rows)
    assert "lower at 0.01 and 0.03, higher at 0.001, not told apart at 0.003" in sentence
    assert "the full-precision loss is not told apart at any peak" in sentence
    assert average_findings(study, [row for row in rows if row["step"] < 640]) == []


def told(page: Page) -> dict[str, str]:
    return {row[0]: row[1] for row in page.rows if len(row) == 2}


def test_the_engine_and_its_version_are_named(page, tmp_path):
    assert told(page)["engine"] == "megatron-core, 2 ranks"
    assert "megatron-core 0.16.1" in told(page)["software"]
    assert "deepspeed" not in told(page)["software"]
    changed = resolve("tiny", "full", ("engine=deepspeed",))
    directory = write_study(tmp_path / "other" / changed.name, changed)
    write_table(directory, changed, collect_rows(directory, changed).rows)
    other = Page(write_report(directory, changed).read_text())
    assert told(other)["engine"] == "deepspeed, ZeRO stage 1, 2 ranks"
    assert "deepspeed 0.19.8" in told(other)["software"]
    assert "megatron" not in told(other)["software"]
    assert 'study run tiny --profile full --set engine=deepspeed --root "$STUDY/.."' in other.code


def test_the_commands_behind_the_numbers_are_there(page):
    assert "-m train run" in page.code
    assert '"$STUDY/lr3e-3/hf/step00000640" "$STUDY/lr3e-3/hf/lawa5x16-step00000640" --spec gptq-b3-g32' in page.code
    assert "python -m curvature run" in page.code
    assert "mlflow server" in page.code


def test_text_is_escaped(collected_dir, study):
    hostile = study.model_copy(update={"description": "<script>alert(1)</script> & more"})
    text = write_report(collected_dir, hostile).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def summary(label: str, before: tuple | None, after: tuple | None) -> RunSummary:
    def one(bounds):
        return None if bounds is None else Estimate(sum(bounds) / 2, *bounds)

    return RunSummary(label, one(after), {"error": one(before)}, {"error": one(after)})


def said(finding, *arguments) -> str:
    sentence = finding(*arguments)
    assert sentence is not None
    return str(sentence)


def test_nothing_is_claimed_where_intervals_overlap():
    vague = [summary("a", (1, 3), (2, 4)), summary("b", (1, 3), (2.5, 5))]
    assert "rose" not in said(anneal_finding, vague, "error", "it")
    assert "all intervals overlap" in said(order_finding, vague, "error", "it")
    assert "overlap" in said(loss_finding, vague)


def test_what_the_intervals_bear_out_is_said():
    clear = [summary("a", (1, 2), (3, 4)), summary("b", (6, 7), (5, 5.5)), summary("c", (7, 9), (8, 9))]
    anneal = said(anneal_finding, clear, "error", "it")
    assert "rose for peak learning rate a" in anneal
    assert "fell for peak learning rate b" in anneal
    assert "no change beyond its intervals for c" in anneal
    assert "rises with every step" in said(order_finding, clear, "error", "it")
    assert "falls with every step" in said(order_finding, clear[::-1], "error", "it")
    mixed = said(order_finding, [clear[0], clear[2], clear[1]], "error", "it")
    assert "a below c, a below b and b below c" in mixed
    assert "apart from all others" in said(loss_finding, clear)


def test_a_partial_table_gives_a_partial_report(collected_dir, study):
    for path in collected_dir.glob("lr3e-2/hf/*/quant/*/result.json"):
        path.unlink()
    for path in collected_dir.glob("*/hf/*/curvature/*/result.json"):
        path.unlink()
    write_table(collected_dir, study, collect_rows(collected_dir, study).rows)
    sentences = findings(study, summarize(study, read_table(collected_dir, study)))
    assert not any("quantization error" in sentence or "trace" in sentence for sentence in sentences)
    text = write_report(collected_dir, study).read_text()
    assert "not measured" in text
