"""The command line as a user meets it."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent


def study_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "study", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tinny"], "no recipe 'tinny'"),
        (["run", "tiny", "--profile", "huge"], "no profile 'huge'"),
        (["status", "absent", "--root", "/nonexistent"], "does not exist"),
        (["collect", "tiny", "--root", "/nonexistent"], "does not exist"),
        (["report", "tiny", "--root", "/nonexistent"], "does not exist"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(arguments, words):
    done = study_command(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_list_show_and_status(study_dir, study):
    assert "tiny (full, smoke)" in study_command("list").stdout
    shown = study_command("show", "tiny", "--profile", "smoke").stdout
    assert "python -m quant_eval run" in shown
    assert "lr3e-2: peak 0.03" in shown
    status = study_command("status", "tiny", "--root", str(study_dir.parent))
    # results alone do not make a step complete: nothing says which command left them
    assert "train      0/4" in status.stdout
    assert f"0/38 steps complete in {study_dir}" in status.stdout


def test_a_used_name_is_refused_before_anything_runs(study_dir):
    path = study_dir / "lr1e-2" / "run.json"
    path.write_text(path.read_text().replace('"seed": 6198', '"seed": 1').replace('"fingerprint"', '"was"'))
    done = study_command("run", "tiny", "--root", str(study_dir.parent))
    assert done.returncode == 2
    assert "lr1e-2" in done.stderr
    assert not (study_dir / "logs").exists()
