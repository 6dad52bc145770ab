"""A recipe in a file of the user's: how it is found, what it makes, and how it is refused."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from dynamics.recipes import resolve
from study.__main__ import app
from study.pipeline.steps import steps_of

MINE = Path(__file__).parent / "mine.py"
HEAD = "from dynamics.recipes.parts import recipe\n"


def test_an_ablation_of_two_factors_takes_25_lines():
    assert len(MINE.read_text().splitlines()) <= 25
    study = resolve(str(MINE), "smoke")
    assert study.name == "rate-and-decay-smoke"
    assert study.description.endswith("on the source of Python packages")
    assert [run.name for run in study.trained if run.schedule.anneal] == [
        *("lr3e-3-wd0", "lr3e-3-wd0.1", "lr1e-2-wd0", "lr1e-2-wd0.1")
    ]
    assert [axis.name for axis in study.axes] == ["peak learning rate", "weight decay"]
    assert len(steps_of(study)) == len({step.name for step in steps_of(study)}) > 40


def test_it_is_shown_and_changed_like_any_other():
    shown = CliRunner().invoke(app, ["show", str(MINE), "--profile", "smoke", "--set", "seed=7"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("rate-and-decay-smoke-seed=7: ")
    assert "train-lr1e-2-wd0.1: " in shown.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no recipe; write one: a function"),
        (f"{HEAD}@recipe\ndef a(): ...\n@recipe\ndef b(): ...\n", r"2 recipes \(a, b\), not one"),
        (f"{HEAD}@recipe\ndef a(*, smoke): return 1\n", "a does not return a study"),
        (f"{HEAD}@recipe\ndef a(*, smoke):\n    return 1 / 0\n", "line 4: ZeroDivisionError"),
        ("import no_such_thing\n", "line 1: ModuleNotFoundError: No module named"),
        ("def a(:\n", "line 1: SyntaxError"),
        (
            f"{HEAD}from dynamics.recipes.parts import study\n@recipe\ndef a(*, smoke):\n"
            "    return study([], text=None, quantization=None)\n",
            r"mine\.py: 'text':",
        ),
    ],
)
def test_a_file_without_one_recipe_is_refused_in_a_line(tmp_path, content, words):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as refused:
        resolve(str(path))
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"does not exist; give a \.py file with a recipe"):
        resolve(str(tmp_path / "other.py"))


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\ufffe", "\u202e"])
def test_a_label_with_a_control_character_is_refused_where_a_recipe_is_read(tmp_path, character):
    """The program that draws would abort at it."""
    path = tmp_path / "mine.py"
    labelled = f"labels={{'lr3e-3-wd0': 'low{character.encode('unicode_escape').decode()}'}},"
    source = MINE.read_text().replace("        text=TEXT,\n", f"        {labelled} text=TEXT,\n")
    path.write_text(source)
    with pytest.raises(UserError, match=r"mine\.py: 'low.*' holds a control character; remove it"):
        resolve(str(path), "smoke")
    path.write_text(
        source.replace(
            labelled, "labels={'lr3e-3-wd0': 'low \N{GREEK SMALL LETTER ETA}\xa0=\u20091'},"
        )
    )
    assert "\xa0" in resolve(str(path), "smoke").labels["lr3e-3-wd0"]
