"""One synthetic study, and its report, for all tests that read results."""

import shutil
from pathlib import Path

import pytest

from study.definition import Study
from study.paths import MLFLOW_STORE, REPORT
from study.report.report import write_report
from study.tracking.store import create_store, store_uri
from tests.conftest import made_once
from tests.study.ablation import tiny
from tests.study.synthetic import draw_nothing, table_of, write_study


@pytest.fixture(scope="session")
def study() -> Study:
    return tiny()


@pytest.fixture(scope="session")
def written_study(tmp_path_factory, study) -> Path:
    """Written once, every file synced to the disk; tests have copies."""
    written = made_once(
        tmp_path_factory, "written", lambda root: write_study(root / study.name, study)
    )
    return written / study.name


HOSTILE = "<img src=x onerror='window.hacked=1'></script><script>alert(window.hacked=1)</script>"


@pytest.fixture(scope="session")
def report(tmp_path_factory, written_study, study) -> Path:
    """The report of a study whose description and first label try to run: the page of all tests
    that read one.
    """

    def write(root: Path) -> None:
        directory = Path(shutil.copytree(written_study, root / study.name))
        table_of(directory, study)
        hostile = {"description": HOSTILE, "labels": {study.runs[0].name: HOSTILE}}
        write_report(directory, study.model_copy(update=hostile))

    return made_once(tmp_path_factory, "report", write) / study.name / REPORT


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """An empty SQLite store of MLflow, which takes two seconds of a core to make one."""

    def make(root: Path) -> None:
        root.mkdir()
        create_store(store_uri(root))

    return made_once(tmp_path_factory, "empty_store", make) / MLFLOW_STORE


@pytest.fixture
def store(tmp_path, empty_store) -> str:
    """The URI of an empty store: that of ROOT."""
    shutil.copy(empty_store, tmp_path / MLFLOW_STORE)
    return store_uri(tmp_path)


@pytest.fixture
def study_dir(tmp_path, written_study, study) -> Path:
    """ROOT/tiny with all results; ROOT is the test's own."""
    return Path(shutil.copytree(written_study, tmp_path / study.name))


@pytest.fixture
def without_pictures(monkeypatch):
    """No picture is drawn of figures, which is most of a report's time."""
    draw_nothing(monkeypatch)


@pytest.fixture
def collected_dir(study_dir, study):
    """The same with its table."""
    table_of(study_dir, study)
    return study_dir
