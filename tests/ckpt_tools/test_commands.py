"""The command line: errors come at once."""

import subprocess
import sys

import pytest

from tests.runs import PROJECT, environment, error_line

HEAVY = ("torch", "transformers", "huggingface_hub")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["export", "none", "out"], "none holds no checkpoint.json"),
        (
            ["import", "none", "out"],
            "none is not a directory; give an HF directory, or OWNER/NAME@",
        ),
        (["average", "out", "none", "nowhere"], "none is not a directory"),
        (["download", "a/b", "out", "--every", "2", "--revision", "c"], "one or the other"),
        *(
            (
                ["download", "a/b", "out", "--tokenizer-only", *option.split()],
                f"--tokenizer-only takes no {option.split()[0]}; leave out one or the other",
            )
            for option in ("--revision c", "--every 2", "--stage d", "--family e/f", "--dry-run")
        ),
        (
            ["download", "a/b", "out", "--dry-run", "--revision", "c"],
            "--dry-run takes no --revision; leave out one or the other",
        ),
        (
            ["download", "a/b", "out", "--revision", "c", "--family", "e/f"],
            "fetched as it is named; leave out --family",
        ),
        (["inspect", "none"], "none is not a directory"),
        (["publish", "none", "out"], "give a run directory"),
    ],
)
def test_errors_do_not_wait_for_heavy_imports(tmp_path, arguments, expected):
    """The line comes where none of these modules can be imported."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", *arguments],
        cwd=PROJECT,
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in error_line(done)
