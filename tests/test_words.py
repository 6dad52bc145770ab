"""The words and names of all source: beginnings of docstrings, names of classes, and long lines."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import MAY_IMPORT, PROJECT

FOLDERS = tuple(MAY_IMPORT)
ALL = (*FOLDERS, "tests")
# A docstring says what its function does, or names what its class is.
VAGUE = {"What", "Whether", "Of", "Where", "Which", "How", "From", "For"}
MOST_COLUMNS, LONG_SHARE = 100, 0.01
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return [path for folder in folders for path in sorted((PROJECT / folder).rglob("*.py"))]


def vague(path: Path) -> Iterator[str]:
    """Places whose docstring begins with such a word."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].rstrip(",:;.") in VAGUE:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield f"{path.relative_to(PROJECT)}:{line}: {' '.join(words[:6])}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    places = [place for path in sources(ALL) for place in vague(path)]
    assert not places, "\n".join(places)


def test_no_two_public_classes_have_one_name():
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(
                    f"{path.relative_to(PROJECT)}:{node.lineno}"
                )
    assert {name: each for name, each in places.items() if len(each) > 1} == {}


def test_lines_are_at_most_100_characters_wide():
    lines = [
        (len(line), f"{path.relative_to(PROJECT)}:{number}")
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    long = [place for width, place in lines if width > MOST_COLUMNS]
    assert len(long) <= LONG_SHARE * len(lines), "\n".join(long)
