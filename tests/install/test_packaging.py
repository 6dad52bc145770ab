"""The wheel that pip makes of this project for an environment of the user's own."""

import shutil
import subprocess
import sys
import zipfile

from tests.runs import PROJECT

FOLDERS = ("base", "ckpt_tools", "curvature", "dynamics", "quant_eval", "slurm", "study", "train")
DATA = ("slurm/sites/*.toml", "study/report/templates/*.html")


def test_it_has_every_module_of_the_project_and_what_they_read(tmp_path):
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(PROJECT / folder, source / folder, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    build += ["--no-index", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path for folder in FOLDERS for path in (PROJECT / folder).rglob("*.py")}
    data = {path for pattern in DATA for path in PROJECT.glob(pattern)}
    assert files == {str(path.relative_to(PROJECT)) for path in modules | data}
