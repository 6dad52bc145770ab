"""`python -m tests.gpu.bundle`: the wheels that tests/gpu and a study on the text of packages
need where there is torch, Python 3.12 and no network, on one GPU or several.

They are in gpu-bundle/part-1, part-2, ..., each below 60 MB, for Python 3.12 on x86-64. There,
beside the checkout:

    python3 -m pip install --no-index --no-deps --target gpu-packages gpu-bundle/part-*/*.whl
    export PYTHONPATH=gpu-packages
    python3 -m tests.gpu [--gpus N]
    python3 -m study run olmo2-quarter-hour
    python3 -m docs.results olmo2-quarter-hour --machine "one H200" --out results

MLflow is not among them: the last step of the study, mirror, fails and says so. All others are
complete then. Table, pictures and claims are in results/.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PART_BYTES = 58 * 10**6
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
# what train, quant_eval and curvature import for the checks, and what that imports, but for torch
# and CUDA's libraries
PACKAGES = (
    *("megatron-core", "einops", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
    *("hf-xet", "fsspec", "filelock", "httpx", "httpcore", "h11", "anyio", "idna", "certifi"),
    *("PyYAML", "regex", "tqdm", "packaging", "pydantic", "pydantic_core", "annotated-types"),
    *("typing-inspection", "typing_extensions", "typer", "click", "shellingham"),
    *("annotated-doc", "rich", "markdown-it-py", "mdurl", "Pygments", "numpy", "scipy", "psutil"),
    *("compressed-tensors", "loguru", "blake3", "nvidia-ml-py"),
    *("hjson", "msgpack", "ninja", "py-cpuinfo"),  # of DeepSpeed
    # what the text, table and report of a study import
    *("pyarrow", "zstandard", "vl-convert-python", "jinja2", "MarkupSafe", "pillow", "matplotlib"),
    *("contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing", "python-dateutil", "six"),
    *("mpmath", "networkx", "sympy"),  # whose sources are its text, as those of transformers
)
SOURCES = ("deepspeed",)  # that PyPI has no wheel of: it is built here, of Python alone


def locked(lock: str, packages: Sequence[str] = PACKAGES) -> list[str]:
    """The packages with the versions of requirements.lock, which were resolved together."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    by_name = {_plain(name): (name, version) for name, version in versions.items()}
    return ["==".join(by_name[_plain(name)]) for name in packages]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parts(sizes: dict[str, int], most: int = PART_BYTES) -> list[list[str]]:
    """Files in groups of at most so many bytes: each, the largest first, where there is room."""
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        room = (
            group
            for group in groups
            if sum(sizes[member] for member in group) + sizes[name] <= most
        )
        group = next(room, None)
        if group is None:
            groups.append(group := [])
        group.append(name)
    return groups


def download(requirements: Sequence[str], out: Path) -> None:
    """The wheels of exactly these versions."""
    platforms = [text for platform in PLATFORMS for text in ("--platform", platform)]
    abis = [text for abi in ("cp312", "abi3", "none") for text in ("--abi", abi)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", *abis]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *platforms]
    command += ["--python-version", PYTHON, "--dest", str(out), *requirements]
    subprocess.run(command, check=True)


def build(requirements: Sequence[str], out: Path) -> None:
    """Wheels made of the sources of exactly these versions."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(out), *requirements], check=True)


def main() -> None:
    """Writes gpu-bundle/."""
    out = PROJECT / "gpu-bundle"
    if out.exists():
        sys.exit(f"error: {out} exists; move it away or use it")
    out.mkdir()
    lock = (PROJECT / "requirements.lock").read_text()
    download(locked(lock), out)
    build(locked(lock, SOURCES), out)
    sizes = {path.name: path.stat().st_size for path in out.glob("*.whl")}
    if too_large := [name for name, size in sizes.items() if size > PART_BYTES]:
        sys.exit(
            f"error: {', '.join(too_large)} is above {PART_BYTES / 1e6:.0f} MB by itself; leave"
            " it out"
        )
    for number, names in enumerate(parts(sizes), start=1):
        part = out / f"part-{number}"
        part.mkdir()
        for name in names:
            (out / name).rename(part / name)
        print(
            f"{part.relative_to(PROJECT)}: {len(names)} wheels,"
            f" {sum(sizes[name] for name in names) / 1e6:.0f} MB"
        )
    print(__doc__)


if __name__ == "__main__":
    main()
