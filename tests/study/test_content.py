"""The content that the engine finds by its places: that of the paper, and of any other package."""

import re
import sys
from types import ModuleType

import pytest

from study import content
from study.claims.page import claims_table, judge_all
from study.claims.verdict import Claim, Evidence, Verdict, claim
from study.content import Content, contents, loaded, recipe_places
from study.figures.canvas import Canvas
from study.figures.charts import Quantity, marks, panel
from study.figures.figure import Drawn, Figure, draw_all, drawn, figure, figures_of
from study.recipes.resolve import named_recipe, recipe_names, resolve
from study.report.text import claims_lines, summary_of
from study.results.paired import Paired
from study.results.table import read_table
from tests.study import mine
from tests.study.commands import printed


@figure("steps", "Steps of the checkpoints.", headline=lambda study: bool(study.runs))
def steps(canvas: Canvas) -> Drawn | None:
    """Draw each checkpoint's step twice."""
    x = Quantity("step")
    rows = [
        {"run": canvas.runs.looks[row["run"]].label} | x.values(row["step"])
        for row in canvas.table
        if not row["average"]
    ]
    return drawn([(rows, panel([marks(rows, canvas.runs, x, x)], "", 1))], 1)


@claim("steps", "Steps rise", source="page 1", needs="checkpoints", figure="steps")
def rising(evidence: Evidence) -> list[Verdict]:
    """Judge that there are rows."""
    return [Verdict("supported", f"{len(evidence.rows)} rows", p=0.001, holds_seeds=True)]


rate_and_decay = mine.rate_and_decay


@pytest.fixture
def other_paper(monkeypatch):
    """A package with a figure, a claim and a recipe, in place of the paper's."""
    package = ModuleType("other_paper.content")
    package.CONTENT = Content(  # type: ignore[attr-defined]
        paper="another paper",
        recipes=(f"{__name__}:rate_and_decay",),
        figures=(f"{__name__}:steps",),
        claims=(f"{__name__}:rising",),
    )
    monkeypatch.setitem(sys.modules, "other_paper", ModuleType("other_paper"))
    monkeypatch.setitem(sys.modules, "other_paper.content", package)
    monkeypatch.setattr(content, "PACKAGES", ("other_paper",))


def test_every_place_of_the_paper_is_of_its_kind():
    assert all(isinstance(each, Figure) for each in loaded("figures"))
    assert all(isinstance(each, Claim) for each in loaded("claims"))
    for kind in ("figures", "claims"):
        names = [each.name for each in loaded(kind)]  # type: ignore[arg-type]
        assert len(set(names)) == len(names)
    for name in recipe_places():
        assert named_recipe(name).name == name
    assert all(map(callable, (*loaded("sentences"), *loaded("tables"), *loaded("commands"))))
    assert [each.paper for each in contents()] == ["arXiv 2510.06213"]


def test_the_engine_runs_the_content_of_another_package(other_paper, collected_dir, study):
    assert recipe_names() == ("rate-and-decay",)
    assert resolve("rate-and-decay", "smoke").name == "rate-and-decay-smoke"
    listed = printed("list")
    head, recipe, profiles = listed.splitlines()
    assert head.split() == ["recipe", "tokens", "H100-hours"]
    assert re.fullmatch(r"rate-and-decay +\S+ +on CPU  Peak learning rate x weight decay.*", recipe)
    assert profiles == "Each has the profiles full and smoke; --all has what each is, in full"

    rows = read_table(collected_dir, study)
    lines = claims_table(judge_all(study, rows, Paired(collected_dir)))
    assert summary_of(lines) == "1 of 1 claims supported"
    head, line, _ = claims_lines(lines)
    assert re.fullmatch(r"claim of another paper +verdict +effect +Holm p", head)
    assert line.startswith("Steps rise")
    assert "supported" in line

    assert [each.name for each in figures_of(study)] == ["steps"]
    (shown,), empty = draw_all(Canvas(study, rows, collected_dir))
    assert (shown.name, shown.headline, empty) == ("steps", True, [])
    assert (collected_dir / "figures/steps.csv").exists()
