"""`make venv` against an index of small wheels that behave like the real ones; what it checks
first; the pins.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import check_machine

PROJECT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.lock", "requirements-cuda.lock")
LEFT_OUT = {"torchao", "maturin", "torchvision", "pypcre"}
PYTHONS = ("3.11", "3.12", "3.13")


def wheel(
    folder: Path, name: str, version: str, needs: tuple[str, ...] = (), source: str = ""
) -> None:
    """A wheel of one package with one file."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    package = {"megatron_core": "megatron/core"}.get(module, module)
    metadata = "".join(
        [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {need}\n" for need in needs),
        ]
    )
    files = {
        f"{package}/__init__.py": source,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def index(folder: Path) -> str:
    """The address of a simple index of all wheels in the folder."""
    for path in folder.glob("*.whl"):
        page = folder / "simple" / canonicalize_name(path.name.split("-")[0]) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        pages = page.read_text() if page.exists() else ""
        page.write_text(f'{pages}<a href="{path.as_uri()}">{path.name}</a>')
    return (folder / "simple").as_uri()


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a path with a space, beside an index like PyPI's: its torch needs CUDA's
    libraries.
    """
    root = tmp_path / "a checkout"
    for name in (
        "Makefile",
        "check_machine.py",
        *(f"quant_eval/{name}.py" for name in ("__init__", "libraries/__init__", "libraries/pcre")),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, root / name)
    check = root / "check_machine.py"
    check.write_text(check.read_text().replace("= 10 * GB, 4 * GB", "= 0, 0"))  # /tmp may be small
    (root / "requirements.lock").write_text(
        "torch==2.13.0\nmegatron-core==1.0\ndeepspeed==1.0\ngptqmodel==1.0\n"
    )
    (root / "requirements-cuda.lock").write_text("nvidia-nccl==2.0\n")
    pypi = tmp_path / "pypi"
    wheel(pypi, "torch", "2.13.0", needs=("nvidia-nccl>=1",), source="import nvidia_nccl")
    for version in ("1.0", "2.0", "3.0"):
        wheel(pypi, "nvidia-nccl", version)
    for name in ("megatron-core", "deepspeed"):
        wheel(pypi, name, "1.0", source="import torch")
    wheel(
        pypi,
        "gptqmodel",
        "1.0",
        needs=("pypcre",),
        source="import os, pcre\nassert os.path.isdir(os.environ['TMPDIR'])",
    )
    index(pypi)
    wheel(tmp_path / "cpu", "torch", "2.13.0+cpu")
    index(tmp_path / "cpu")
    return root


def make(root: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `make venv` in the checkout, with no pip configuration but the index."""
    pip = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (root.parent / "pypi" / "simple").as_uri(),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_COMPILE": "1",
    }
    of_make = ("MAKE", "MFLAGS", "PYTHON3", "TORCH_INDEX")  # where make runs this test
    plain = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "TMPDIR", *of_make))
    }
    return subprocess.run(
        ["make", f"PYTHON3={sys.executable}", "venv", *settings],
        cwd=root, env=plain | pip | environment, capture_output=True, text=True, check=False, umask=0o077,
    )  # fmt: skip


def installed(root: Path) -> dict[str, str]:
    """The versions in .venv, by name."""
    folder = next((root / ".venv").glob("lib/python3*/site-packages"))
    distributions = importlib.metadata.distributions(path=[str(folder)])
    return {
        canonicalize_name(distribution.name): distribution.version for distribution in distributions
    }


@pytest.mark.stress
def test_torch_comes_with_cuda_and_a_cpu_index_changes_it(checkout):
    done = make(checkout)
    assert done.returncode == 0, done.stderr
    assert {"torch": "2.13.0", "nvidia-nccl": "2.0", "gptqmodel": "1.0"}.items() <= installed(
        checkout
    ).items()
    assert not (checkout / ".venv" / "tmp").exists()
    assert "Nothing to be done" in make(checkout).stdout

    cpu = f"TORCH_INDEX={(checkout.parent / 'cpu' / 'simple').as_uri()}"
    done = make(checkout, cpu)
    assert done.returncode == 0, done.stderr
    assert installed(checkout)["torch"] == "2.13.0+cpu"
    assert "nvidia-nccl" not in installed(checkout)
    for settings in ((), (cpu,)):
        assert "pip install" not in make(checkout, *settings).stdout


MISSING = "libnccl.so.2: cannot open shared object file"


@pytest.fixture
def broken(checkout):
    """The same with a library of CUDA that does not load; `make venv` was run in it."""
    wheel(checkout.parent / "pypi", "nvidia-nccl", "2.0", source=f"raise ImportError({MISSING!r})")
    return checkout, make(checkout)


def test_what_does_not_start_is_not_complete(broken):
    checkout, done = broken
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert errors == [f"error: ImportError: {MISSING} (.venv/import.log); run make again"]
    assert not (checkout / ".venv" / "complete").exists()


@pytest.mark.stress
def test_a_second_make_repairs_and_takes_a_configured_folder_of_wheels(broken):
    checkout, _ = broken
    done = make(checkout, PIP_FIND_LINKS=str(checkout.parent / "cpu"))
    assert done.returncode == 0, done.stderr
    assert installed(checkout)["torch"] == "2.13.0+cpu"
    assert (checkout / ".venv" / "complete").exists()


def test_a_machine_that_cannot_is_refused_before_its_venv_is_touched(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "kept").touch()
    script = checkout / "check_machine.py"
    script.write_text(script.read_text().replace("= 0, 0", "= 10**18, 0"))
    done = make(checkout)
    assert done.returncode == 2
    assert re.search(
        r"^error: installing takes 1000000000.0 GB and .* make TORCH_INDEX=\S+/cpu$",
        done.stderr,
        re.MULTILINE,
    )
    assert (checkout / ".venv" / "kept").exists()


def test_a_link_to_an_environment_is_refused_and_what_it_points_to_is_kept(checkout):
    elsewhere = checkout / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (checkout / ".venv").symlink_to(elsewhere)
    done = make(checkout)
    assert done.returncode == 2
    assert f"error: .venv is a link to {elsewhere}" in done.stderr
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize(
    ("version", "right"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)]
)
def test_pythons(version, right):
    problem = check_machine.python_problem(version)
    assert (problem is None) == right
    assert right or str(problem).startswith(
        f"Python 3.{version[1]} cannot run this, 3.11 to 3.13 can: install one (apt-get"
    )


def test_pyproject_names_the_same_pythons():
    oldest, newest = check_machine.OLDEST, check_machine.NEWEST
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


def test_a_python_without_ensurepip_is_told_the_package():
    assert check_machine.venv_problem((3, 13)) is None
    problem = check_machine.venv_problem((3, 13), find={"venv": 1}.get)
    assert "apt-get install python3.13-venv" in str(problem)


@pytest.mark.parametrize(
    ("free", "torch_index", "words"),
    [
        (12e9, "", None),
        (5e9, "", "installing takes 10.0 GB and 5.0 GB are free here: .* make TORCH_INDEX="),
        (5e9, "https://download.pytorch.org/whl/cpu/", None),
        (
            1e9,
            "https://download.pytorch.org/whl/cpu",
            "installing takes 4.0 GB and 1.0 GB are free here: .* elsewhere$",
        ),
    ],
)
def test_disk(free, torch_index, words):
    problem = check_machine.disk_problem(free, torch_index)
    assert (problem is None) if words is None else re.match(words, str(problem))


def pins(name: str) -> dict[str, str]:
    """Versions that a lock pins, by canonical name."""
    lines = [line for line in (PROJECT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line) for line in lines), (
        "a pin of another form"
    )
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_what_the_extras_need_and_nothing_else(python):
    """Followed through the metadata of what is installed here, whose markers are evaluated for
    each Python.
    """
    locked, cuda = pins(LOCKS[0]), pins(LOCKS[1])
    assert not locked.keys() & (cuda.keys() | LEFT_OUT)
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    todo = [Requirement(need) for need in project["dependencies"]]
    todo += [Requirement(need) for extra in extras for need in extras[extra] if extra != "gpu"]
    seen, environment = set(), {"python_version": python, "python_full_version": f"{python}.0"}
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if name in LEFT_OUT:
            continue
        assert name in locked | cuda, f"{need} is not pinned"
        assert need.specifier.contains((locked | cuda)[name], prereleases=True), (
            f"{need} is not what is pinned"
        )
        if name in cuda or (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        for line in importlib.metadata.requires(name) or ():
            child = Requirement(line)
            if any(
                child.marker is None or child.marker.evaluate(environment | {"extra": extra})
                for extra in need.extras | {""}
            ):
                todo.append(child)
    assert {name for name, _ in seen} == locked.keys()
