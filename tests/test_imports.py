"""The import rule: data flows right, imports point left, engines stay inside train/, and no
files go in circles.
"""

import ast
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CHECKPOINTS = {"base", "train", "ckpt_tools"}
STUDIES = CHECKPOINTS | {"quant_eval", "curvature", "study"}
MAY_IMPORT = {
    "install": {"base", "quant_eval"},  # the latter by the check of a .venv that is complete
    "base": set(),
    "train": {"base"},
    "ckpt_tools": {"base", "train"},
    "quant_eval": CHECKPOINTS,
    "curvature": CHECKPOINTS,
    "study": STUDIES - {"study"},
    "dynamics": STUDIES,
    "slurm": STUDIES,
    "docs": STUDIES | {"dynamics", "slurm"},
}
# Folders of train/ that need no engine.
OPEN_TO_ALL = {"run", "data", "model", "optimizers", "planning"}
ENGINES = {"megatron", "deepspeed"}

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


def refused_imports(path: Path) -> list[str]:
    """Imports of a file that point right, or reach an engine from outside its folder."""
    folder = path.relative_to(PROJECT).parts[0]
    refused = []

    for name in imported_names(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top in MAY_IMPORT and top != folder:
            needs_engine = top == "train" and rest.split(".")[0] not in OPEN_TO_ALL
            if top not in MAY_IMPORT[folder] or needs_engine:
                refused.append(f"{path.relative_to(PROJECT)} imports {name}")
        if top in ENGINES and f"train/{top}" not in path.as_posix():
            refused.append(f"{path.relative_to(PROJECT)} imports {name} outside train/{top}")
    return refused


def test_imports_point_left():
    assert [line for path in FILES for line in refused_imports(path)] == []


def test_what_is_open_to_all_needs_no_engine():
    for folder in OPEN_TO_ALL:
        for path in (PROJECT / "train" / folder).rglob("*.py"):
            for module in imported_modules(path):
                top, _, rest = module.partition(".")
                allowed = top == "base" or rest.split(".")[0] in OPEN_TO_ALL
                assert allowed, f"{path} imports {module}"


def test_no_files_import_each_other_in_a_circle():
    assert circle({module: imported_modules(path) for module, path in MODULES.items()}) == {}


def folder_of(module: str) -> str:
    """Return the folder of a module, two names deep; the module itself where it is in none."""
    parts = MODULES[module].relative_to(PROJECT).parts
    return ".".join(parts[:2]) if len(parts) > 2 else module


def test_no_folders_import_each_other_in_a_circle():
    needs: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        needed = {folder_of(other) for other in imported_modules(path)}
        needs.setdefault(folder_of(module), set()).update(needed)
    assert circle(needs) == {}


def circle(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return what is left after all that needs nothing is taken away, again and again."""
    pending = {name: needed - {name} for name, needed in needs.items()}
    while free := {name for name, needed in pending.items() if not needed & pending.keys()}:
        pending = {name: needed - free for name, needed in pending.items() if name not in free}
    return pending
