"""The commands that choose, as a user meets them."""

import re

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from dynamics.recipes.parts import sweep
from study.__main__ import app
from tests.study import factors
from tests.study.synthetic import table_of, write_study


def output_of(*arguments: str) -> str:
    """Return what a command prints; a refusal is raised."""
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_commands_print_what_they_find(collected_dir, study):
    root = ["--root", str(collected_dir.parent)]
    run = study.trained[0]

    chosen = output_of("choose", study.name, *root)
    assert "the peak learning rate" in chosen.splitlines()[0]
    assert "quantized loss (GPTQ, 3 bits, groups of 32) in nats per token, at the end of" in chosen
    with pytest.raises(UserError, match="--loss 9 is outside"):
        output_of("choose", study.name, "--loss", "9", *root)

    assert "not fitted: 1 of 3 sizes" in output_of("compare", study.name, *root)
    assert (collected_dir.parent / "compared" / "ends.parquet").exists()

    steps = str(run.save_steps[0])
    assert "1 cooldown: " in output_of("cooldowns", study.name, run.name, "--steps", steps, *root)
    with pytest.raises(UserError, match="--steps now are not steps"):
        output_of("cooldowns", study.name, run.name, "--steps", "now", *root)

    with pytest.raises(UserError, match="trains no run absent"):
        output_of("choose-average", study.name, "absent", *root)


def test_a_study_of_another_factor_is_answered_by_its_effects(tmp_path):
    """It is refused by `choose`, which names the command that prints them."""
    study = factors.of("own", sweep(factors.run, weight_decay=[0.0, 0.1]))
    table_of(write_study(tmp_path / study.name, study), study)
    root = ["--root", str(tmp_path)]
    words = "begins with the effect of weight decay, see also 'python -m study report own --claims'"
    with pytest.raises(UserError, match=words):
        output_of("choose", study.name, *root)
    printed = output_of("report", study.name, "--claims", *root).splitlines()
    assert printed[:2] == ["Effect of weight decay at the end", "0.1 against 0:"]
    assert (
        "  GPTQ, 3 bits, groups of 32: KL divergence, nats per token  +0 [+0, +0], p 1*" in printed
    )
    assert any(line.startswith("Claims of arXiv 2510.06213") for line in printed)


def test_the_report_says_the_first_of_them(report):
    assert re.search(
        r'<p id="choice">[^<]* the peak learning rate [^<]* has the lowest', report.read_text()
    )
