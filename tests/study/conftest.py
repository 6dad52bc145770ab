"""One synthetic study for all tests that read results."""

from pathlib import Path

import pytest

from study.collect import collect_rows, write_table
from study.recipes import Study, tiny
from tests.study.synthetic import write_study


@pytest.fixture(scope="session")
def study() -> Study:
    return tiny()


@pytest.fixture
def study_dir(tmp_path, study) -> Path:
    """ROOT/tiny with all results; ROOT is the test's own."""
    return write_study(tmp_path / study.name, study)


@pytest.fixture
def collected_dir(study_dir, study):
    """The same with its table."""
    write_table(study_dir, study, collect_rows(study_dir, study).rows)
    return study_dir
