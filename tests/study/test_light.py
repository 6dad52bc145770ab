"""Commands that people type often import no library that takes a second of a core."""

import json
import subprocess
import sys

import pytest

from tests.docs.pages import PROJECT
from tests.study.ablation import tiny
from tests.study.synthetic import table_of, write_study

HEAVY = ("torch", "transformers", "matplotlib", "mlflow", "pandas", "scipy.stats", "scipy")
# What runs a command as `python -m` does, then prints which of the heavy libraries it imported.
CHILD = """
import json, runpy, sys
from contextlib import redirect_stdout, suppress
module, *sys.argv[1:] = sys.argv[1:]
with suppress(SystemExit), redirect_stdout(sys.stderr):
    runpy.run_module(module, run_name="__main__", alter_sys=True)
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs of the ablation, with a result of everything."""
    directory = tmp_path_factory.mktemp("light")
    study = tiny()
    study = study.model_copy(update={"runs": study.runs[:2]})
    write_study(directory / "tiny", study)
    table_of(directory / "tiny", study)
    return directory


@pytest.mark.parametrize(
    "command",
    [
        "quant_eval run --help",
        "study list",
        "study status tiny --root {root}",
        "study report tiny --claims --root {root}",
    ],
)
def test_no_heavy_library_is_imported(root, command):
    words = command.format(root=root).split()
    child = [sys.executable, "-c", CHILD.format(heavy=HEAVY), *words]
    done = subprocess.run(child, cwd=PROJECT, capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    if "--claims" in words:
        assert imported == ["scipy"], "Student's distribution, of scipy.special"
        assert "Claims of arXiv 2510.06213" in done.stderr
    else:
        assert imported == []
