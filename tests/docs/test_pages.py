"""The pages: their links lead somewhere, generated ones are not stale, README is short."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from docs.generate import PAGES, REFERENCE, REPRODUCE
from docs.paper import FIGURES, PICTURES, SHOWN, page, take_pictures
from docs.paper import MOST_BYTES as MOST_BYTES_OF_PICTURE
from study.recipes.resolve import whole_recipes
from tests.docs.pages import NAMES
from tests.runs import PROJECT

LINK = re.compile(r"\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")
COMMAND = re.compile(r"`(?:make|python -m) [^`]+`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MOST_BYTES, MOST_COLUMNS = 6000, 100  # of README.md


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles]
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    page = PROJECT / name
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(PROJECT), link
        if anchor:
            assert anchor in anchors(target), link


def test_readme_is_short():
    text = (PROJECT / "README.md").read_text()
    assert len(text.encode()) <= MOST_BYTES
    for line in text.splitlines():
        assert len(line) <= MOST_COLUMNS, line


def test_every_page_is_in_the_index():
    index = {
        (PROJECT / "docs" / link.partition("#")[0]).resolve()
        for link in LINK.findall((PROJECT / "docs/README.md").read_text())
    }
    pages = {PROJECT / name for name in NAMES} - {PROJECT / "README.md", PROJECT / "docs/README.md"}
    assert pages <= index


def test_the_gallery_shows_every_picture_once_with_the_command_that_makes_it():
    gallery, _, _ = (PROJECT / "docs/README.md").read_text().partition("## Guides")
    shown = PICTURE.findall(gallery)
    files = [(PROJECT / "docs" / path).resolve() for _, path in shown]
    stored = [path for path in (PROJECT / "docs/pictures").rglob("*") if path.is_file()]
    studies = [PROJECT / f"docs/results/{name}/kl_divergence.png" for name in ("tiny", "tiny-long")]
    assert sorted(files) == sorted([*stored, *studies])
    assert all(len(words.split()) >= 5 for words, _ in shown)
    for section in gallery.split("\n## ")[1:]:
        assert COMMAND.findall(section), section.partition("\n")[0]
    assert set(re.findall(r"study run ([\w-]+)", gallery)) <= set(whole_recipes())


def test_other_tools_are_compared_in_the_versions_of_the_lock():
    text = (PROJECT / "docs/comparison.md").read_text()
    lock = set((PROJECT / "requirements.lock").read_text().splitlines())
    named = re.findall(r"^\| \[[^|]*\| ([\w-]+) ([\d.]+) \|", text, re.MULTILINE)
    assert len(named) == 4
    for package, version in named:
        assert f"{package}=={version}" in lock
        assert re.search(rf"pypi.org/project/{package}/{re.escape(version)}/", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_that_of_the_code_as_it_is(name):
    stored = (REFERENCE / name).read_text()
    assert stored == PAGES[name](), "run python -m docs.generate"


def test_the_table_of_figures_is_that_of_the_recipes_as_they_are():
    stored = REPRODUCE.read_text()
    assert stored == page(stored), "run python -m docs.generate"


def test_every_figure_of_the_paper_has_its_command():
    """Figures whose numbers are known, and the two sections on data."""
    numbers = {figure.number for figure in FIGURES}
    assert {"1", "2", "section 4.1", "section 4.2", *"3456", "8", "12", "13", "19"} <= numbers
    assert {"20", "23"} <= numbers
    assert {figure.small for figure in FIGURES} - {"", "tiny"} == SHOWN.keys()
    pictures = {path.stem: path.stat().st_size for path in PICTURES.glob("*")}
    assert pictures.keys() == SHOWN.keys()
    assert max(pictures.values()) <= MOST_BYTES_OF_PICTURE


def test_a_small_picture_keeps_the_colours_of_thin_lines(tmp_path, monkeypatch):
    """Beside more greys than it has colours, and far more pixels of them."""
    lines = [(27, 7, 135), (151, 21, 158), (226, 101, 97)]
    pixels = np.tile(np.linspace(0, 255, 760)[:, None, None], (1, 760, 3)).astype(np.uint8)
    for place, colour in enumerate(lines):
        pixels[:, 100 + 200 * place] = colour
    for name, (figure, _) in SHOWN.items():
        path = tmp_path / "figures" / name / f"{figure}.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path)
    monkeypatch.setattr("docs.paper.PICTURES", tmp_path / "small")
    take_pictures(tmp_path)
    for name in SHOWN:
        with Image.open(tmp_path / "small" / f"{name}.png") as image:
            small = np.asarray(image.convert("RGB")).astype(int)
        for place, colour in enumerate(lines):
            assert np.abs(small[:, 100 + 200 * place] - colour).max() < 16


def test_no_other_page_is_among_the_generated():
    assert {path.name for path in REFERENCE.iterdir()} == PAGES.keys()
