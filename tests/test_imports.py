"""The import rule: data flows right, imports point left, and engines stay inside train/."""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "train": set(),
    "ckpt_tools": {"train"},
    "quant_eval": {"train", "ckpt_tools"},
    "curvature": {"train", "ckpt_tools"},
    "study": {"train", "ckpt_tools", "quant_eval", "curvature"},
    "slurm": {"train", "ckpt_tools", "quant_eval", "curvature", "study"},
}
LIGHT = {
    "command", "compare", "config", "corpus", "corpus_writer", "data", "documents", "families", "flops", "frozen",
    "gpus",
    "initialization", "layout", "manifest", "memory", "models", "order", "part", "plan", "plan_report", "prepare",
    "repetition", "run_directory", "schedule_plot", "schedules", "settings", "share", "shards", "stopping",
    "tokenizer", "tracking",
}  # fmt: skip
ENGINES = {"megatron", "deepspeed"}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


FILES = [path for folder in MAY_IMPORT for path in sorted((PROJECT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_imports_point_left(path):
    folder = path.relative_to(PROJECT).parts[0]
    for module in imported_modules(path):
        top, _, rest = module.partition(".")
        if top in MAY_IMPORT and top != folder:
            assert top in MAY_IMPORT[folder], f"{folder} imports {module}"
            if top == "train":
                assert rest.split(".")[0] in LIGHT, f"{module} is not one of train's light modules"
        if top in ENGINES:
            assert f"train/{top}" in path.as_posix(), f"{module} is imported outside train/{top}"


@pytest.mark.parametrize("name", sorted(LIGHT))
def test_light_modules_need_no_engine(name):
    for module in imported_modules(PROJECT / "train" / f"{name}.py"):
        top, _, rest = module.partition(".")
        assert top not in ENGINES
        assert top != "train" or rest.split(".")[0] in LIGHT


def test_files_stay_small():
    sizes = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {str(path): size for path, size in sizes.items() if size > 300} == {}
