"""The names that megatron-core takes from transformer_engine, and those its releases define.

Both are read, neither is imported: transformer-engine is of use with a GPU alone, and takes a
compiler to install. `python -m tests.train.transformer_engine_names` downloads its wheels (1 MB
each, Python alone) and writes the record beside this file: of every name the releases without it. A
name is dotted, from the package to a module, a class or a function.
"""

import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "transformer_engine"
# PyPI's newest of every minor release, from the one that the oldest container we know of brings to
# the one that is pinned.
VERSIONS = (
    *("2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1"),
    *("2.15.0", "2.16.1", "2.17.1", "2.18.0", "2.19.0", "2.20.2"),
)
RECORD = Path(__file__).with_suffix(".json")
# What `train.megatron.transformer_engine` asks, or has megatron-core ask of a class.
OWN = {
    "transformer_engine.pytorch.module.linear.Linear(fuse_wgrad_accumulation)",
    *(
        f"transformer_engine.pytorch.is_{numbers}_available"
        for numbers in ("fp8", "fp8_block_scaling", "mxfp8")
    ),
}


def taken_names() -> set[str]:
    """Names that the installed megatron-core imports or reaches as attributes of a module; OWN."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    texts = [path.read_text() for path in Path(spec.origin).parent.rglob("*.py")]
    return OWN.union(*(names_of(ast.parse(text)) for text in texts if PACKAGE in text))


def names_of(module: ast.Module) -> set[str]:
    """The names that one module takes."""
    nodes = list(ast.walk(module))
    names, modules = set(), dict[str, str]()  # the latter: by the name that they are bound to
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    names.add(alias.name)
                    modules[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    for node in nodes:
        if isinstance(node, ast.Attribute):
            bound, _, rest = ast.unparse(node).partition(".")
            if bound in modules and rest.replace(".", "").isidentifier():
                names.add(f"{modules[bound]}.{rest}")
    return names


class Release:
    """The Python sources of one release."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            self.sources = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if name.endswith(".py")
            }

    def path(self, module: str) -> str | None:
        """The file of a module."""
        stem = module.replace(".", "/")
        return next(
            (path for path in (f"{stem}/__init__.py", f"{stem}.py") if path in self.sources), None
        )

    def has(self, name: str) -> bool:
        """Return whether a name of `taken_names` is defined, with the parameter in its parentheses.

        Attributes of classes and functions are not looked for, nor what it imports by name from
        other packages.
        """
        name, _, parameter = name.rstrip(")").partition("(")
        if parameter:
            return self.takes(name, parameter)
        module, *rest = name.split(".")
        while rest and self.path(f"{module}.{rest[0]}"):
            module = f"{module}.{rest.pop(0)}"
        if not rest:
            return True
        defined = self.defined(module)
        if rest[0] not in defined:
            return False
        source = defined[rest[0]]
        return (
            source is None
            or source.split(".")[0] != PACKAGE
            or self.has(".".join([source, *rest[1:]]))
        )

    def takes(self, name: str, parameter: str) -> bool:
        """Return whether a class, defined in the module that names it, is made with a parameter."""
        module, _, kind = name.rpartition(".")
        tree = ast.parse(self.sources[self.path(module) or ""])
        constructors = [
            method
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == kind
            for method in node.body
            if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        ]
        return any(each.arg == parameter for method in constructors for each in method.args.args)

    def defined(self, module: str) -> dict[str, str | None]:
        """Return what a module defines: None, or for what it imports the dotted name of that."""
        path = self.path(module)
        if path is None:
            return {}
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        names: dict[str, str | None] = {}
        for node in ast.walk(ast.parse(self.sources[path])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names[node.name] = None
            elif isinstance(node, ast.Assign):
                names |= {
                    target.id: None for target in node.targets if isinstance(target, ast.Name)
                }
            elif isinstance(node, ast.ImportFrom):
                parents = (
                    package.split(".")[: len(package.split(".")) + 1 - node.level]
                    if node.level
                    else []
                )
                source = ".".join([*parents, *([node.module] if node.module else [])])
                for alias in node.names:
                    names |= (
                        self.defined(source)
                        if alias.name == "*"
                        else {alias.asname or alias.name: f"{source}.{alias.name}"}
                    )
        return names


def derive() -> dict[str, list[str]]:
    """Return for every name that is taken the releases without it; needs PyPI.

    Raises:
        RuntimeError: pip cannot download a release.
    """
    lacking: dict[str, list[str]] = {name: [] for name in sorted(taken_names())}
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as place:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
            command = [*pip, "--dest", place, f"{PACKAGE}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"this needs PyPI: {done.stderr.strip().splitlines()[-1]}")
            release = Release(next(Path(place).glob("*.whl")))
        for name, versions in lacking.items():
            if not release.has(name):
                versions.append(version)
    return lacking


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(versions)}" for name, versions in derive().items()]
    RECORD.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
