"""The report: complete, self-contained, and claiming no more than the intervals allow."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import markupsafe
import pyarrow.parquet as pq
import pytest
from PIL import Image

from base.environment import version_line
from study.figures.figure import FILES
from study.recipes.resolve import resolve
from study.recipes.shown import summary
from study.report.provenance import commands, settings_of
from study.report.report import write_report
from study.report.tables import heat_tables
from study.results.paired import Paired
from study.results.summary import summarize
from study.results.table import Row, schema_of
from tests.study.conftest import HOSTILE
from tests.study.synthetic import ATTEMPT, table_of, write_study
from train.run.directory import RunDirectory
from train.run.optimization import Anneal


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
        self.references += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "srcset", "action", "data")
        ]
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


@pytest.fixture(scope="module")
def page(report) -> Page:
    return Page(report.read_text())


def test_it_needs_nothing_but_itself_and_shows_pictures_without_scripts(page, report):
    """Besides its pictures it names files that are beside it, for the reader to open."""
    assert "link" not in page.tags
    files = ("figures/", "tables/", "#")
    pictures = [address for address in page.references if not address.startswith(files)]
    figures = report.read_text().count("<figure ")
    assert figures == 12
    sizes = []
    for reference in pictures:
        kind, _, data = reference.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            sizes.append(image.width)
            assert len(set(image.convert("L").tobytes())) > 8, (
                "blank; the small ones have few greys"
            )
    beside = [address for address in page.references if address.startswith("figures/")]
    assert len(beside) == 4 * figures
    assert all((report.parent / name).stat().st_size > 500 for name in beside)
    tables = [address for address in page.references if address.startswith("tables/")]
    assert len(tables) == 2 * 6
    assert all((report.parent / name).stat().st_size > 100 for name in tables)
    text = report.read_text()
    assert text.count('<div class="chart" hidden>') == figures - 1, "slices are a picture"
    assert sum(size > 800 for size in sizes) == figures, "and small ones beside the claims"
    assert '<div class="runs" hidden>' in text, "buttons that do nothing without scripts"


def test_a_row_per_learning_rate_with_intervals(page, study):
    rows = {row[0]: row[1:] for row in page.rows if len(row) == 1 + 1 + 2 * 2}
    for label in (HOSTILE, "0.003", "0.01", "0.03"):
        assert all("[" in cell for cell in rows[label])
    # the synthetic error is 0.02 x the share of the anneal's formula: 2 % x 1.6 x 1.0 at the end of
    # the lowest peak
    assert rows[HOSTILE][2].startswith("3.20[")


def test_averages_stand_beside_the_weights_of_their_step(page, study):
    rows = [
        row
        for row in page.rows
        if len(row) == 1 + 1 + 1 + 2 * 3
        and row[0] == "0.01"
        and row[1][:4] != "GPTQ"
        and row[1][:2] not in ("3 ", "4 ", "8 ")
    ]
    title = "LAWA, 5 weights 16 steps apart"
    soups = ("soup of steps 192, 320 and 448", "soup of steps 512, 576 and 640")
    labels = ["step 448, before the anneal", title, soups[0], "step 640, annealed", title, soups[1]]
    assert [row[1] for row in rows] == labels, (
        "the ends of the phases, not every step with an average"
    )
    for weights, average in (
        (rows[start], rows[start + beside]) for start in (0, 3) for beside in (1, 2)
    ):
        # synthetic averages: a loss 0.08 lower and an error 0.6 times as large
        (loss, error), (averaged_loss, averaged_error) = (
            [float(row[column].split("[")[0]) for column in (2, 4)] for row in (weights, average)
        )
        assert loss - averaged_loss == pytest.approx(0.08, abs=2e-3)
        # the intervals leave two digits
        assert averaged_error / error == pytest.approx(0.6, abs=0.05)
        assert all("[" in cell for cell in (*weights[2:], *average[2:]))


def test_methods_stand_below_each_other_with_what_is_said_of_them(page, study):
    rows = {row[0]: row[1:] for row in page.rows if len(row) == 1 + 4 and "[" in row[1]}
    assert list(rows) == [
        "3 bits",  # of GPTQ, as the page says once
        "RTN, 3 bits, groups of 32",
        "GPTQ by gptqmodel, 3 bits, groups of 32",
        "AWQ, 3 bits, groups of 32",
        "3 bits, Hadamard",
        "4 bits",
        "RTN, 4 bits, groups of 32, activations 4 bits",
        "RTN, 4 bits, groups of 32, activations 4 bits, QuaRot",
        "NVFP4, activations as weights",
        "LLM.int8(), threshold 6",
    ]
    cells = [[float(cell.split("[")[0]) for cell in row] for row in rows.values()]
    costs = (1, 2.2, 1.02, 1.8, 0.9, 0.18, 2.6, 1.6, 1.3, 0.004)
    for row, cost in zip(cells, costs, strict=True):  # as the synthetic methods cost
        assert row == pytest.approx([cost * value for value in cells[0]], rel=0.1)  # two digits
    assert all("[" in cell for row in rows.values() for cell in row)


def test_steps_stand_with_their_terms_in_thousandths_of_a_nat(page, study):
    rows = [row for row in page.rows if len(row) == 1 + 1 + 5 + 2 and "bits" in row[1]]
    labels = [HOSTILE, "0.003", "0.01", "0.03"]
    titles = ["3 bits", "4 bits", "GPTQ, 8 bits, groups of 32"]
    assert [row[:2] for row in rows] == [[label, title] for title in titles for label in labels]
    first, second, predicted, measured, left = (float(cell.split("[")[0]) for cell in rows[0][2:7])
    # the synthetic error of 3.2 % of a loss of 3.24, of which the second order predicts 96 %, a
    # tenth of it to first
    assert measured == pytest.approx(1000 * 0.032 * 3.24, rel=0.1)
    expected = [0.96 * measured, 0.096 * measured, 0.864 * measured, 0.04 * measured]
    assert [predicted, first, second, left] == pytest.approx(
        expected, rel=0.1
    )  # rounded as their intervals allow
    assert {row[7] for row in rows} == {"0.250[0.203, 0.297]"}


def facts(page: Page) -> dict[str, str]:
    return {row[0]: row[1] for row in page.rows if len(row) == 2}


def test_the_engine_and_its_version_are_named(page, tmp_path):
    assert facts(page)["engine"] == "megatron-core, 1 rank"
    software = "quantdyn 7.8.9, python 3.99.1, torch 2.99.2, megatron-core 0.99.3"
    assert facts(page)["software"] == software
    assert (
        facts(page)["versions"]
        == "differs from the tested versions: torch 2.99.2 here, 2.14.0 tested"
    )
    assert facts(page)["this report"] == version_line()
    changed = resolve("tiny", "full", ("engine=deepspeed",))
    directory = write_study(tmp_path / "other" / changed.name, changed)
    settings = settings_of(directory, changed)
    assert settings["engine"] == "deepspeed, ZeRO stage 1, 1 rank"
    assert "deepspeed 0.99.4" in settings["software"]
    assert "megatron" not in settings["software"]
    again = 'study run tiny --profile full --set engine=deepspeed --root "$STUDY/.."'
    assert any(again in "\n".join(lines) for lines in commands(directory, changed).values())


def test_the_floor_of_an_anneal_is_named_where_it_is_shown(tmp_path):
    study = resolve("tiny", "full")
    annealed = study.trained[0]
    anneal = Anneal(start_step=768, floor=0.5)
    schedule = annealed.schedule.model_copy(update={"anneal": anneal})
    changed = study.model_copy(
        update={"runs": (annealed.model_copy(update={"schedule": schedule}),)}
    )
    directory = write_study(tmp_path / changed.name, changed)
    words = "linear anneal from step 768 to 50% of the rate there"
    assert words in settings_of(directory, changed)["schedule"]
    assert words in " ".join(line.strip() for line in summary(changed))


def test_the_commands_behind_the_numbers_are_there(page):
    assert "-m train run" in page.code
    last = [f'"$STUDY/lr3e-3/hf/{name}step00000640"' for name in ("", "lawa5x16-", "soup-anneal-")]
    assert f"{' '.join(last)} --spec gptq-b3-g32" in page.code
    assert f"python -m ckpt_tools average {last[2]}" in page.code
    assert "python -m curvature hutchinson" in page.code
    assert "mlflow server" in page.code


def test_the_verdicts_of_the_claims_are_at_the_top_with_their_effects(page, report):
    lines = {row[0]: row[1:] for row in page.rows if len(row) == 6}
    verdict, effect, *_ = lines["Fewer bits cost more"]
    assert verdict == "holds in these runs", "one training of each peak"
    column = "quant/gptq-b{}-g32/kl_divergence"
    table = pq.read_table(report.parent / "table.parquet")
    last = [row for row in table.to_pylist() if row["step"] == 640 and row["average"] is None]
    differences = [row[column.format(3)] - row[column.format(4)] for row in last]
    mean = 1000 * sum(differences) / len(differences)  # in 10^-3 nats/token
    assert float(effect.split(" ")[0]) == pytest.approx(mean, rel=0.1), "to the digits shown"
    text = report.read_text()
    assert 'class="holds">holds in these runs<' in text
    assert text.index('id="effect-1"') < text.index('id="claims"')
    assert text.index('id="claims"') < text.index('id="figures"') < text.index('id="table-1"')
    for target in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{target}"' in text


def test_two_axes_have_a_table_of_both(study, tmp_path):
    """Peak learning rate by weight decay: a row of the one, a column of the other."""
    base = study.trained[0]
    runs = []
    for peak, decay in ((0.001, 0.1), (0.001, 0.3), (0.01, 0.1), (0.01, 0.3)):
        optimizer = base.optimizer.model_copy(update={"peak_lr": peak, "weight_decay": decay})
        update = {"name": f"lr{peak:g}-wd{decay:g}", "optimizer": optimizer}
        runs.append(base.model_copy(update=update))
    both = study.model_copy(update={"runs": tuple(runs), "soups": (), "averaged_steps": ()})
    column = "quant/gptq-b3-g32/kl_divergence"
    empty = dict.fromkeys(schema_of(both).names)
    rows = []
    for index, run in enumerate(runs):
        value = {column: 0.1 * (1 + index), f"{column}_low": 0.0, f"{column}_high": 1.0}
        identity = {"run": run.name, "step": run.total_steps, "phase": "anneal", "study": "both"}
        rows.append(Row.of(empty | identity | value))
    first, second = heat_tables(both, summarize(both, rows), Paired(tmp_path))
    assert first.groups == [("", 1), ("weight decay", 2)]
    assert list(first.head) == ["peak learning rate", "0.1", "0.3"]
    assert [[cell.text for cell in line] for line in first.body] == [
        ["0.001", "100", "200"],
        ["0.01", "300", "400"],
    ]
    shades = [cell.shade for line in first.body for cell in line[1:]]
    assert shades == sorted(shades)
    assert second.body[0][1].text == "not measured"
    assert (first.is_shaded, second.is_shaded) == (True, False)
    assert first.note.startswith("KL divergence, 10^-3 nats/token.")


def test_a_table_of_relative_errors_has_its_unit_in_the_cells(study, tmp_path):
    """Shaded like one of divergences, and no unit in its note."""
    base = study.trained[0]
    quantization = study.quantization.model_copy(update={"measure": "relative_error"})
    runs = tuple(
        base.model_copy(update={"name": f"lr{peak:g}-wd{decay:g}", "optimizer": optimizer})
        for peak, decay in ((0.001, 0.1), (0.001, 0.3), (0.01, 0.1), (0.01, 0.3))
        for optimizer in [
            base.optimizer.model_copy(update={"peak_lr": peak, "weight_decay": decay})
        ]
    )
    changes = {"runs": runs, "soups": (), "averaged_steps": (), "quantization": quantization}
    both = study.model_copy(update=changes)
    column = "quant/gptq-b3-g32/relative_error"
    empty = dict.fromkeys(schema_of(both).names)
    value = {column: 0.25, f"{column}_low": 0.0, f"{column}_high": 1.0}
    rows = [
        Row.of(empty | value | {"run": run.name, "step": run.total_steps, "phase": "anneal"})
        for run in runs
    ]
    shown, *_ = heat_tables(both, summarize(both, rows), Paired(tmp_path))
    assert shown.title == "Relative error at the end of training: GPTQ, 3 bits, groups of 32"
    assert shown.body[0][1].text == "25"
    assert (shown.is_shaded, shown.note) == (True, "Relative error, %.")


@pytest.mark.parametrize(
    ("recipe", "first"), [("tiny", "study corpus"), ("pythia-160m-lr", "ckpt_tools download")]
)
def test_commands_are_listed_under_what_they_make(tmp_path, recipe, first):
    """A tokenizer that is trained, and one that is downloaded."""
    study = resolve(recipe, "full")
    listed = commands(tmp_path / study.name, study)
    verbs = {
        part: [" ".join(line.partition(" -m ")[2].split()[:2]) for line in lines]
        for part, lines in listed.items()
    }
    assert verbs["table, report and MLflow"] == ["study collect", "study report", "study mirror"]
    assert verbs["text and tokenizer"][0] == first


def test_the_command_is_that_of_the_recipe_whose_name_begins_with_another_one(tmp_path):
    """The recipe tiny saves no step 96, and would refuse it."""
    study = resolve("tiny-paper", "full", ("averaged_steps=[96]", "planes=[]"))
    _, again = commands(tmp_path / study.name, study)["the whole study again"]
    assert again.startswith("python -m study run tiny-paper --profile full --set ")


def test_text_is_escaped(report):
    text = report.read_text()
    assert "<script>alert" not in text
    assert str(markupsafe.escape(HOSTILE)) in text


@pytest.mark.usefixtures("without_pictures")
def test_a_partial_table_gives_a_partial_report(collected_dir, study):
    """Figures without data are left out, their files too, and named; the others hold what there
    is. Trained on two kinds of GPUs, it says so on top.
    """
    for number, run in enumerate(study.trained):
        environment = RunDirectory(collected_dir / run.name).environment_json
        nodes = [{"hosts": ["node1"], "gpus": [f"NVIDIA H{200 if number else 100}"]}]
        environment.write_text(json.dumps({"attempts": [ATTEMPT | {"nodes": nodes}]}))
    for pattern in ("lr3e-2/hf/*/quant", "*/hf/*/curvature", "*/hf/*/blocks"):
        for path in collected_dir.glob(f"{pattern}/*/result.json"):
            path.unlink()
    for kind in FILES:
        (collected_dir / "figures").mkdir(exist_ok=True)
        (collected_dir / f"figures/slices.{kind}").write_text("of yesterday")
    table_of(collected_dir, study)
    text = write_report(collected_dir, study).read_text()
    mixed = "Trained on processors of different kinds: lr1e-3 on NVIDIA H100; lr3e-3"
    assert mixed in text.partition("<nav>")[0]
    assert "not measured" in text
    missing = "curvature, error against curvature, blocks, formula, prediction, slices."
    assert f"nothing of it is measured yet: {missing}" in text
    files = {path.name for path in (collected_dir / "figures").iterdir()}
    names = (
        *("ends", "quantization_error", "kl_divergence", "losses", "averages"),
        *("methods", "full_against_quantized"),
    )
    assert files == {f"{name}.{kind}" for name in names for kind in FILES}
