"""The smoke study on machines that have nothing: `tests/fresh_machine.sh`. Hours; needs root,
debootstrap and PyPI.
"""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fresh_machine.sh")


@pytest.mark.stress
@pytest.mark.parametrize("arguments", [("trixie",), ("trixie", "--as-root")], ids=" ".join)
def test_the_smoke_study_runs_on_a_fresh_machine(arguments):
    done = subprocess.run(
        [SCRIPT, *arguments, "--smoke"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "report.html" in done.stdout
