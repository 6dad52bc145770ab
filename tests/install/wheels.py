"""An index of small wheels that behave like the real ones."""

import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name


def wheel(
    folder: Path,
    name: str,
    version: str,
    needs: tuple[str, ...] = (),
    source: str = "",
    program: str = "",
) -> Path:
    """A wheel of one package with one file, and a program of its name if one is given."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    package = {"megatron_core": "megatron/core"}.get(module, module)
    metadata = "".join(
        [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {need}\n" for need in needs),
        ]
    )
    files = {
        f"{package}/__init__.py": source,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    if program:
        files[f"{module}-{version}.data/scripts/{name}"] = program
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o100755 if "scripts" in path else 0o100644) << 16
            archive.writestr(entry, text)
    return file


def index(folder: Path) -> str:
    """The address of a simple index of all wheels in the folder."""
    for path in folder.glob("*.whl"):
        page = folder / "simple" / canonicalize_name(path.name.split("-")[0]) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        pages = page.read_text() if page.exists() else ""
        page.write_text(f'{pages}<a href="{path.as_uri()}">{path.name}</a>')
    return (folder / "simple").as_uri()
