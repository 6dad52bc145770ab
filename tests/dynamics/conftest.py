"""The fixtures of `tests.study`: one synthetic study with all its results."""

from tests.study.conftest import (  # noqa: F401  (fixtures)
    collected_dir,
    report,
    study,
    study_dir,
    written_study,
)
