"""The import rule: data flows right, imports point left, engines stay inside train/, and no
files go in circles.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "install": {"base", "quant_eval"},  # the latter by the check of a .venv that is complete
    "base": set(),
    "train": {"base"},
    "ckpt_tools": {"base", "train"},
    "quant_eval": {"base", "train", "ckpt_tools"},
    "curvature": {"base", "train", "ckpt_tools"},
    "study": {"base", "train", "ckpt_tools", "quant_eval", "curvature"},
    "slurm": {"base", "train", "ckpt_tools", "quant_eval", "curvature", "study"},
    "docs": {"base", "train", "ckpt_tools", "quant_eval", "curvature", "study", "slurm"},
}
OPEN_TO_ALL = {"run", "data", "model", "planning"}  # folders of train/ that need no engine
ENGINES = {"megatron", "deepspeed"}
LONGEST_FILE, MOST_FILES = 300, 14

FILES = [path for folder in MAY_IMPORT for path in sorted((PROJECT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_modules(path: Path) -> set[str]:
    """Modules of this project that the file imports, wherever in it."""
    names = imported_names(ast.parse(path.read_text()))
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & MODULES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_imports_point_left(path):
    folder = path.relative_to(PROJECT).parts[0]
    for name in imported_names(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top in MAY_IMPORT and top != folder:
            assert top in MAY_IMPORT[folder], f"{folder} imports {name}"
            if top == "train":
                assert rest.split(".")[0] in OPEN_TO_ALL, f"{name} may need an engine"
        if top in ENGINES:
            assert f"train/{top}" in path.as_posix(), f"{name} is imported outside train/{top}"


@pytest.mark.parametrize("folder", sorted(OPEN_TO_ALL))
def test_what_is_open_to_all_needs_no_engine(folder):
    for path in (PROJECT / "train" / folder).rglob("*.py"):
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            assert top == "base" or rest.split(".")[0] in OPEN_TO_ALL, f"{path} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    pending = {module: imported_modules(path) - {module} for module, path in MODULES.items()}
    while free := {module for module, needed in pending.items() if not needed & pending.keys()}:
        pending = {module: needed for module, needed in pending.items() if module not in free}
    assert pending == {}


def test_files_and_folders_stay_small():
    sizes = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {str(path): size for path, size in sizes.items() if size > LONGEST_FILE} == {}
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(path): count for path, count in folders.items() if count > MOST_FILES} == {}
