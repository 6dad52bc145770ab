"""The two recipes of the image: the same files and commands, those of make and of the lock."""

import re
import tomllib
from pathlib import Path

import pytest

from slurm.site import load_site
from tests.install.conftest import COPIED
from tests.runs import PROJECT

IMAGES = PROJECT / "slurm" / "images"
DOCKERFILE, DEFINITION = (IMAGES / name for name in ("Dockerfile", "quantdyn.def"))
LOCKS = {path.name for path in PROJECT.glob("*.lock")}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as pairs of a keyword and its text, comments and line ends taken out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    pairs = [line.split(" ", 1) for line in lines if line]
    return [(word, text) for word, text in pairs]


def all_of(keyword: str) -> list[str]:
    return [text for word, text in instructions() if word == keyword]


def section(name: str) -> list[str]:
    """The lines of a section of the definition."""
    (text,) = re.findall(
        rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION.read_text(), re.MULTILINE | re.DOTALL
    )
    return [line.strip() for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line.strip()]


def placed(pattern: str, folder: str) -> dict[str, str]:
    """Every file of the checkout that the pattern means, with its place in the image."""
    paths = list(PROJECT.glob(pattern))
    assert paths, f"{pattern} is no file of the checkout"
    return {str(path.relative_to(PROJECT)): f"{folder}/{path.name}" for path in paths}


def by_docker() -> dict[str, str]:
    (workdir,) = all_of("WORKDIR")
    files: dict[str, str] = {}
    for line in all_of("COPY"):
        *patterns, folder = line.split()
        for pattern in patterns:
            files |= placed(pattern, str(Path(workdir, folder)))
    return files


def by_apptainer() -> dict[str, str]:
    files: dict[str, str] = {}
    for line in section("files"):
        pattern, folder = line.split()
        files |= placed(pattern, folder.rstrip("/"))
    return files


def test_both_copy_what_make_venv_reads():
    """A test of the installation runs make venv with these files alone."""
    assert by_docker() == by_apptainer()
    assert by_docker().keys() == {*COPIED, *LOCKS}
    (workdir,) = all_of("WORKDIR")
    assert all(target == f"{workdir}/{name}" for name, target in by_docker().items())


def test_both_run_the_same_commands():
    (workdir,) = all_of("WORKDIR")
    packages, environment, user = all_of("RUN")
    post = "\n".join(section("post"))
    assert packages in post
    assert f"cd {workdir}\n{environment.replace('$INSTALL', '{{ INSTALL }}')}" in post
    assert re.search(r" make \$INSTALL\b", environment)
    assert user.startswith("useradd ")
    assert all_of("USER") == [user.split()[-1]], "who runs it is not root"


def test_both_have_the_same_defaults_and_make_has_the_target():
    defaults = dict(line.split("=", 1) for line in all_of("ARG"))
    assert defaults.pop("DEBIAN_FRONTEND")
    assert dict(line.split("=", 1) for line in section("arguments")) == defaults
    assert re.search(rf"^{defaults['INSTALL']}:", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert {f"export {line}" for line in all_of("ENV")} == set(section("environment"))


def test_the_base_has_the_cuda_of_the_lock_and_a_python_that_it_is_for():
    (base,) = [line.partition("=")[2] for line in all_of("ARG") if line.startswith("BASE=")]
    ((cuda, system),) = re.findall(r"^nvidia/cuda:(\d+\.\d+)\.\d+-base-(\w+\.\d+)$", base)
    lock = (PROJECT / "requirements-cu130.lock").read_text()
    assert re.search(rf"^cuda-toolkit=={re.escape(cuda)}\.", lock, re.MULTILINE)
    assert system == "ubuntu24.04"  # whose python3 is 3.12
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(">=3.12,")


@pytest.mark.parametrize("page", ["docs/guides/cluster.md", "slurm/images/quantdyn.def"])
def test_what_is_said_of_nvidias_image_is_the_same_everywhere(page):
    settings = r"--build-arg BASE=(\S+) (?:\\\n#\s+)?--build-arg INSTALL=\"([^\"]+)\""
    (expected,) = re.findall(settings, DOCKERFILE.read_text())
    assert re.findall(settings, (PROJECT / page).read_text()) == [expected]


def test_the_python_of_the_image_is_that_of_the_site_file():
    (workdir,) = all_of("WORKDIR")
    python = f"{workdir}/.venv/bin/python"
    container = load_site(Path(__file__).parent / "golden" / "apptainer.toml").container
    assert container
    assert container.python == python
    assert f'python = "{python}"' in (PROJECT / "docs" / "guides" / "cluster.md").read_text()
    assert any(line.startswith(f"PATH={workdir}/.venv/bin:$PATH ") for line in all_of("ENV"))
