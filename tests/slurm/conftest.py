"""A real SLURM for the tests of this folder."""

import shutil
import tempfile
from pathlib import Path

import pytest

from slurm.values import checked_path
from tests.lacking import skip
from tests.slurm.lab import Lab, missing, running
from tests.waiting import wait_until


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Add the ends of all logs of jobs to the report of a test that failed."""
    report = yield
    tmp_path = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and tmp_path:
        for log in sorted(tmp_path.rglob("slurm/logs/*.log")):
            report.sections.append((str(log), log.read_text(errors="replace")[-2000:]))
    return report


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skips where no lab can run."""
    if reason := missing():
        skip(f"no SLURM here: {reason}")


@pytest.fixture(scope="session", autouse=True)
def checkout_that_sbatch_takes() -> None:
    """Skips in a checkout that every site refuses, such as one in a path with a space."""
    try:
        checked_path(Path.cwd())
    except ValueError as error:
        skip(f"no SLURM from this checkout: {error}")


@pytest.fixture
def lab_directory():
    """A place for a lab of a test's own.

    pytest's directories are too deep: the name of a Unix socket ends at 108 bytes.
    """
    directory = Path(tempfile.mkdtemp(prefix="lab"))
    yield directory / "cluster"
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def lab(tmp_path_factory, slurm_installed):
    """Four nodes of 16 CPUs and 8 fake GPUs for all tests of a worker, by SLURM_CONF."""
    with (
        running(Lab(tmp_path_factory.mktemp("lab") / "cluster")) as lab,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("SLURM_CONF", str(lab.conf))
        yield lab


@pytest.fixture(scope="session")
def started_accounting_lab(tmp_path_factory, slurm_installed):
    """Two nodes whose SLURM keeps accounts, and itself soon forgets what has ended."""
    directory = tmp_path_factory.mktemp("lab") / "cluster"
    settings = {"MinJobAge": "2"}
    with running(Lab(directory, nodes=2, extra_conf=settings, accounting=True)) as lab:
        yield lab


@pytest.fixture
def accounting_lab(started_accounting_lab, monkeypatch):
    """A SLURM with accounts, which SLURM_CONF names for a test; its jobs end with the test."""
    lab = started_accounting_lab
    monkeypatch.setenv("SLURM_CONF", str(lab.conf))
    yield lab
    lab.command("scancel", "--user=root")
    wait_until(lambda: not lab.command("squeue", "--noheader"), "no job left")
