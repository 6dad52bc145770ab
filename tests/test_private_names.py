"""The table of private names: whole, of the installed versions, and of names that there are."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

from base.libraries.private_names import READ_FOR, USES, replace
from tests.test_imports import FILES, MODULES, PROJECT

DISTRIBUTIONS = {"megatron": "megatron-core"}  # by module, where they differ
PROMISED = {"_asdict", "_fields", "_replace", "_exit"}  # of named tuples and of os
OURS = {name.partition(".")[0] for name in MODULES}
Found = tuple[str, str]  # file, last part of a name
LISTED: set[Found] = {(use.user, name) for use in USES for name in use.names}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_libraries(tree: ast.AST) -> dict[str, str]:
    """Modules and names of libraries by the local names that stand for them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(
            node.target, ast.Name
        ):  # module: Any = torch
            match node.value:
                case ast.Name(id=name) if name in names:
                    names[node.target.id] = names[name]
    known = OURS | sys.stdlib_module_names
    return {local: name for local, name in names.items() if name.partition(".")[0] not in known}


def names_given_in(tree: ast.AST) -> set[str]:
    """Names that this project gives to methods, functions and attributes."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


OUR_NAMES = {name for path in FILES for name in names_given_in(ast.parse(path.read_text()))}


def uses(path: Path) -> Iterator[Found]:
    """Private names of libraries in a file of the product, and those that it replaces."""
    tree, file = ast.parse(path.read_text()), str(path.relative_to(PROJECT))
    libraries = names_of_libraries(tree)
    for name in libraries.values():
        if any(map(is_private, name.split("."))):
            yield file, name.rpartition(".")[2]

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if is_private(name):
                    yield file, name
            case ast.Attribute(value=value, attr=name, ctx=context):
                of_library = root(value) in libraries
                replaced = isinstance(context, ast.Store) and of_library
                ours = name in OUR_NAMES and not of_library
                ours |= isinstance(value, ast.Name) and value.id in ("self", "cls")
                if replaced or (is_private(name) and not ours and name not in PROMISED):
                    yield file, name
            case ast.Call(func=ast.Name(id="replace"), args=[_, ast.Constant(value=str(name)), _]):
                yield file, name
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, *_]):
                assert root(owner) not in libraries, f"{file}: replace, not setattr"


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_every_private_name_is_in_the_table_and_every_row_is_used():
    used = {use for path in FILES for use in uses(path)}
    assert used - LISTED == set()
    texts = {user: (PROJECT / user).read_text() for user, _ in LISTED}
    assert [(user, name) for user, name in LISTED if name not in texts[user]] == []


@pytest.mark.parametrize("library", READ_FOR)
def test_the_table_was_read_for_the_version_that_is_installed(library):
    assert version(library).partition("+")[0] == READ_FOR[library], (
        f"look at the names of {library} in base/libraries/private_names.py, then state the version"
    )


def test_every_library_of_the_table_has_its_version_there():
    modules = {use.owner.partition(".")[0] for use in USES} - sys.stdlib_module_names
    assert {DISTRIBUTIONS.get(module, module) for module in modules} == READ_FOR.keys()


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.user}-{use.owner}")
def test_no_name_has_gone(use):
    assert [name for name in use.names if not is_there(use.owner, name)] == []


def is_there(owner: str, name: str) -> bool:
    """Return whether a module or class has a name; but for torch and Python, by its source."""
    if owner.partition(".")[0] in {"torch", *sys.stdlib_module_names}:
        return hasattr(resolve_name(owner), name) or name in members(owner)
    return name in members(owner)


@cache
def members(owner: str) -> set[str]:
    """The names of a module or class, found without an import, which takes some of them seconds."""
    module, _, last = owner.rpartition(".")
    if source := source_of(owner):
        return bound(ast.parse(source.read_text()))
    source = source_of(module)
    assert source, owner
    package = module if source.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source.read_text())):
        match node:
            case ast.ClassDef(name=name) if name == last:
                return bound(node)
            case ast.ImportFrom(module=imported, level=level, names=aliases):
                if last in {alias.asname or alias.name for alias in aliases}:
                    above = package.rsplit(".", level - 1)[0] if level else None
                    return members(".".join(filter(None, [above, imported, last])))
    raise AssertionError(f"{owner} has gone")


def source_of(module: str) -> Path | None:
    top, *parts = module.split(".")
    spec = find_spec(top)
    assert spec
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *parts)
        for source in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if source.is_file():
                return source
    return None


def bound(tree: ast.AST) -> set[str]:
    """Every name that a module or class gives a value to, its attributes too."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="globals"))):
                names.add(ast.literal_eval(node.slice))
    return names


def test_what_has_gone_is_not_replaced_in_silence():
    class Library:
        name = 1

    assert replace(Library, "name", 2) == 1
    assert Library.name == 2
    with pytest.raises(AttributeError):
        replace(Library, "gone", 2)
