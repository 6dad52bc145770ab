"""`make venv` against an index of small wheels, with pip and with uv."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from install.packages import UV, certificates, fetched_uv
from tests.install.conftest import errors, installed, make
from tests.install.wheels import index, wheel
from tests.runs import write_program

MISSING = "libnccl.so.2: cannot open shared object file"


def index_of(root: Path, build: str) -> str:
    """The setting that takes torch from one of the indexes beside the checkout."""
    return f"TORCH_INDEX={(root.parent / build / 'simple').as_uri()}"


def installing_with(tool: str, folder: Path) -> dict[str, str]:
    """Variables by which make takes pip or a real uv, this machine's or the one it would fetch."""
    if tool == "pip" or shutil.which("uv"):
        return {"INSTALLER": tool}
    program, *_ = fetched_uv(sys.executable, folder) or pytest.skip(f"pip finds no {UV}")
    return {"INSTALLER": tool, "PATH": f"{Path(program).parent}:{os.environ['PATH']}"}


@pytest.mark.stress
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_torch_comes_with_cuda_and_an_index_changes_it(checkout, tmp_path, tool):
    variables = installing_with(tool, tmp_path)
    done = make(checkout, **variables)
    assert done.returncode == 0, done.stderr
    assert installed(checkout).items() >= {"torch": "2.14.0", "nvidia-nccl": "2.0"}.items()
    assert not (checkout / ".venv" / "tmp").exists()
    assert "Nothing to be done" in make(checkout).stdout

    for build, library in (("cpu", None), ("cu126", "nvidia-nccl-cu12")):
        done = make(checkout, index_of(checkout, build), **variables)
        assert done.returncode == 0, done.stderr
        assert installed(checkout)["torch"] == f"2.14.0+{build}"
        nccl = {name for name in installed(checkout) if "nccl" in name}
        assert nccl == ({library} if library else set())
        for settings in ((), (index_of(checkout, build),)):
            assert "Nothing to be done" in make(checkout, *settings).stdout


def test_it_says_what_it_does_and_what_that_takes(checkout):
    done = make(checkout, index_of(checkout, "cpu"))
    assert done.returncode == 0, done.stderr
    # on a busy machine there is progress between the parts
    lines = [line for line in done.stdout.splitlines() if " s    " not in line]
    assert re.match(r"    0 s  environment: Python 3\.1[23]\.\d+ \(/", lines[0])
    assert re.search(
        r"download: 5 packages by pip \(INSTALLER=pip\), .* torch 2\.14\.0 without CUDA$", lines[1]
    )
    parts = [re.sub(r" \d+", "", part) for part in lines[-2].split(": ")[1].split(", ")]
    assert parts == ["environment", "download", "unpack", "import"]
    assert re.fullmatch(re.escape(str(checkout / ".venv")) + r": 0\.\d GB, 5 packages", lines[-1])
    assert not list(checkout.glob(".venv/lib/*/site-packages/numpy/__pycache__"))  # not imported


STAND_IN_FOR_UV = """#!/bin/sh
# uv --no-cache [--system-certs] pip install --python PYTHON --index URL ... -r PINS
for pins; do :; done
[ "$1" = --no-cache ] || exit 1
until [ "$1" = --python ]; do shift; done
echo "Prepared packages"
exec "$2" -m pip install --quiet --no-deps --extra-index-url "$4" -r "$pins"
"""


@pytest.mark.stress
def test_uv_is_fetched_where_none_is_installed_and_no_mirror_is_configured(checkout, tmp_path):
    """The variable that tells uv the index is set, as where neither is configured."""
    name, _, version = UV.partition("==")
    wheel(tmp_path / "pypi", name, version, program=STAND_IN_FOR_UV)
    index(tmp_path / "pypi")
    shim = write_program(tmp_path / "shims/uv", "#!/bin/sh\nexit 127\n")
    path = f"{shim.parent}:{os.environ['PATH']}"
    done = make(checkout, index_of(checkout, "cpu"), INSTALLER="", PATH=path)
    assert "download: 5 packages by uv (faster than pip)" in done.stdout
    assert done.returncode == 0, done.stderr
    assert installed(checkout)["torch"] == "2.14.0+cpu"
    assert "uv" not in installed(checkout)


def test_a_fetched_uv_trusts_whom_the_system_trusts(tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert certificates() == []  # a bare image: uv brings certificates of its own

    (tmp_path / "0a1b2c3d.0").touch()
    assert certificates() == ["--system-certs"]


@pytest.fixture
def broken(checkout):
    """The same with a library of CUDA that does not load; `make venv` was run in it."""
    wheel(checkout.parent / "pypi", "nvidia-nccl", "2.0", source=f"raise ImportError({MISSING!r})")
    return checkout, make(checkout)


def test_what_does_not_start_is_not_complete(broken):
    checkout, done = broken
    assert errors(done) == [f"error: ImportError: {MISSING} (.venv/import.log); run make again"]
    assert not (checkout / ".venv" / "complete").exists()


@pytest.mark.stress
def test_a_second_make_repairs_and_takes_a_configured_folder_of_wheels(broken):
    checkout, _ = broken
    done = make(checkout, PIP_FIND_LINKS=str(checkout.parent / "cpu"))
    assert done.returncode == 0, done.stderr
    assert installed(checkout)["torch"] == "2.14.0+cpu"
    assert (checkout / ".venv" / "complete").exists()


@pytest.mark.stress
def test_an_index_without_the_build_is_refused_rather_than_replaced_by_pypi(checkout):
    (checkout.parent / "empty" / "cpu").mkdir(parents=True)
    done = make(checkout, f"TORCH_INDEX={(checkout.parent / 'empty' / 'cpu').as_uri()}")
    assert "No matching distribution found for torch==2.14.0+cpu" in done.stderr
    assert errors(done)[-1] == (
        "error: pip did not install everything (.venv/install.log); run make again"
    )


@pytest.mark.stress
def test_packages_that_pythonpath_hides_are_named(checkout):
    hiding = checkout.parent / "module"
    zipfile.ZipFile(wheel(checkout.parent, "numpy", "0.9")).extractall(hiding)
    done = make(checkout, index_of(checkout, "cpu"), PYTHONPATH=str(hiding))
    assert errors(done) == [
        "error: numpy==1.0 is 0.9; unset PYTHONPATH if it is set (.venv/import.log); run make again"
    ]


def python_of(folder: Path) -> str:
    """A Python that says it is the version that the folder is named after."""
    folder.mkdir()
    spoof = folder / "spoof.py"
    spoof.write_text(
        "import runpy, sys\n"
        f"sys.version_info = (*map(int, {folder.name!r}.split('.')), 0, 'final', 0)\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = ''\n"
        "flag = sys.argv.pop(0)\n"
        "exec(sys.argv[0]) if flag == '-c' else runpy.run_module(sys.argv[0], run_name='__main__',"
        " alter_sys=True)\n"
    )
    program = f'#!/bin/sh\nexec "{sys.executable}" "{spoof}" "$@"\n'
    return str(write_program(folder / "python", program))


DRIVER = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"


def nvidia_smi(folder: Path) -> str:
    """PATH with an nvidia-smi of a driver for CUDA 12."""
    write_program(folder / "nvidia-smi", f"#!/bin/sh\necho '{DRIVER}'\n")
    return f"{folder}:{os.environ['PATH']}"


def test_a_machine_that_cannot_is_refused_in_one_line_and_its_venv_kept(checkout, tmp_path):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "kept").touch()
    for settings, variables, words in (
        ((), {"PYTHON3": python_of(tmp_path / "3.11")}, "Python 3.11 cannot run this, 3.12 and"),
        ((), {"PYTHON3": python_of(tmp_path / "3.14")}, "Python 3.14 cannot run this, 3.12 and"),
        ((), {"PYTHON3": "python3.99"}, "no python3.99 on PATH"),
        ((), {"PATH": nvidia_smi(tmp_path / "smi")}, "driver 550.54.15 runs CUDA up to 12.4 and"),
        (("SYSTEM_TORCH=yes",), {}, "SYSTEM_TORCH=yes is unknown; give SYSTEM_TORCH=1"),
        (("INSTALLER=conda",), {}, "INSTALLER=conda is unknown; give pip or uv"),
        (("TORCH_INDEX=https://a.b/whl/cu128",), {}, "TORCH_INDEX=https://a.b/whl/cu128 does not"),
        (("SYSTEM_TORCH=1", "TORCH_INDEX=a/cpu"), {}, "SYSTEM_TORCH=1 takes no torch from TORCH_"),
    ):
        (line,) = errors(make(checkout, *settings, **variables))
        assert line.startswith(f"error: {words}")
    assert (checkout / ".venv" / "kept").exists()


def test_a_full_disk_is_refused(checkout):
    script = checkout / "install" / "machine.py"
    script.write_text(script.read_text().replace("= 0, 0", "= 10**18, 0"))
    (line,) = errors(make(checkout))
    assert re.match(
        r"error: installing takes 1000000000.0 GB and .* make TORCH_INDEX=\S+/cpu$", line
    )


def test_a_link_to_an_environment_is_refused_and_what_it_points_to_is_kept(checkout):
    elsewhere = checkout / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (checkout / ".venv").symlink_to(elsewhere)
    (line,) = errors(make(checkout))
    assert line.startswith(f"error: .venv is a link to {elsewhere}")
    assert (elsewhere / "kept").exists()
