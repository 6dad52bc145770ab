"""The generated pages are those of the code as it is."""

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_not_stale(name):
    stored = (REFERENCE / name).read_text()
    assert stored == PAGES[name](), "run python -m docs.generate"


def test_nothing_else_is_there():
    assert {path.name for path in REFERENCE.iterdir()} == PAGES.keys()
