"""The commands that choose, as a user meets them."""

import re

import pytest
from typer.testing import CliRunner

from base.errors import UserError
from study.__main__ import app


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
    assert "quantized loss (GPTQ, 3 bits, groups of 32), at the end of" in chosen
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


def test_the_report_says_the_first_of_them(report):
    assert re.search(
        r'<p id="choice">[^<]* the peak learning rate [^<]* has the lowest', report.read_text()
    )
