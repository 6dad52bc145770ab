"""One synthetic study for all tests that read results."""

import shutil
from pathlib import Path

import pytest

from study.collect import collect_rows, write_table
from study.recipes import tiny
from study.settings import Study
from tests.study.synthetic import write_study


@pytest.fixture(scope="session")
def study() -> Study:
    return tiny()


@pytest.fixture(scope="session")
def written_study(tmp_path_factory, study) -> Path:
    """Written once, every file synced to the disk; tests have copies."""
    return write_study(tmp_path_factory.mktemp("written") / study.name, study)


@pytest.fixture
def study_dir(tmp_path, written_study, study) -> Path:
    """ROOT/tiny with all results; ROOT is the test's own."""
    return Path(shutil.copytree(written_study, tmp_path / study.name))


@pytest.fixture
def collected_dir(study_dir, study):
    """The same with its table."""
    write_table(study_dir, study, collect_rows(study_dir, study).rows)
    return study_dir
