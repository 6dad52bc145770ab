"""A stand-in for srun with the options of pyxis, and for enroot: both refuse as these do.

As a program, `pyxis.py srun ARGUMENT...` checks the options of pyxis, takes them out, and starts the
srun of REAL_SRUN with the rest; on every task `pyxis.py task OPTIONS COMMAND...` keeps unpacked
containers by their name, below NODES/NODE, sets the environment as pyxis leaves it, and becomes the
command. Files are not isolated: that the mounts are enough is for the test to see. `pyxis.py enroot
remove --force NAME` is the only command of enroot. Rules and versions are those of pyxis 0.24.0 and
enroot 4.1.2, read in their sources. Standard library only: this starts once for each task.
"""

import fcntl
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

# The minor version (0.N) that an option of pyxis first is in, and whether it has an argument.
OPTIONS = {
    "container-image": (1, True),
    "container-mounts": (1, True),
    "container-workdir": (1, True),
    "container-name": (1, True),
    "container-mount-home": (3, False),
    "no-container-mount-home": (3, False),
    "container-remap-root": (4, False),
    "no-container-remap-root": (4, False),
    "container-save": (7, True),
    "container-entrypoint": (8, False),
    "no-container-entrypoint": (8, False),
    "container-writable": (11, False),
    "container-readonly": (11, False),
    "container-env": (15, True),
    "container-entrypoint-log": (20, False),
    "container-unshare": (24, True),
}
NAME_FLAGS = ("auto", "create", "exec", "no_exec")
MOUNT_FLAGS = """
    async atime bind defaults dev diratime dirsync exec lazytime noatime nodev nodiratime noexec
    nofail nolazytime norelatime nostrictatime nosuid private rbind relatime remount ro rprivate
    rshared rslave runbindable rw shared silent slave strictatime suid sync unbindable
    x-create=auto x-create=dir x-create=file
"""
# [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST], after docker://, which may be left out.
URI = re.compile(
    r"(docker://)?([^/#@]+@)?([^#/@]+#)?[a-z0-9/._-]+(:[A-Za-z0-9._:-]+)?(@sha256:[A-Za-z0-9]+)?"
)
SQUASHFS = b"hsqs"  # the first bytes of the format
# An image of NVIDIA's for PyTorch sets what the job sets, too.
IMAGE_ENVIRONMENT = {
    "PYTORCH_VERSION": "2.9.0a0",
    "NVIDIA_PYTORCH_VERSION": "25.10",
    "OMP_NUM_THREADS": "64",
    "PYTHONPATH": "/nowhere/image",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "CUDA_VISIBLE_DEVICES": "7",
}


class RefusedError(Exception):
    """An error that srun, pyxis or enroot would end with."""


@dataclass(frozen=True)
class Container:
    """The options of pyxis in a command line."""

    image: str | None = None
    name: str | None = None
    workdir: str | None = None
    mounts: list[list[str]] = field(default_factory=list)  # source, target, flags
    env: list[str] = field(default_factory=list)


def read(arguments: list[str], minor: int = 24) -> tuple[Container, list[str], list[str]]:
    """Return the options of pyxis, those of srun, and the command, of a version 0.`minor`.

    Raises:
        RefusedError: an option is unknown, ill-formed, or given twice with two values.
    """
    given: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        name, equals, value = option.removeprefix("--").partition("=")
        if "container" not in name:
            # `--name value` may as well be an option without a value, and then the command.
            if not option.startswith("--"):
                raise RefusedError(f"srun: a short option: {option}")
            others.append(option)
            continue
        if OPTIONS.get(name, (99, False))[0] > minor:
            raise RefusedError(f"srun: unrecognized option '{option}'")
        if OPTIONS[name][1] and not value:
            raise RefusedError(f"pyxis: --{name}: argument required")
        if not OPTIONS[name][1] and equals:
            raise RefusedError(f"srun: option '--{name}' doesn't allow an argument")
        if given.setdefault(name, value) != value:
            raise RefusedError(f"pyxis: --{name} specified multiple times")
    if not rest:
        raise RefusedError("srun: no command given to execute")
    return _container(given), others, rest


def _container(given: dict[str, str]) -> Container:
    """Check the values of the options, as far as the command line alone shows."""
    image, name = given.get("container-image"), given.get("container-name")
    # By its first character pyxis knows a file.
    if image and image[0] not in "./" and not URI.fullmatch(image):
        raise RefusedError(f"enroot: Invalid image reference: docker://{image}")
    if image and image[0] not in "./" and image.endswith((".sqsh", ".squashfs")):
        raise RefusedError(f"pyxis: failed to import docker image: {image}")
    if name is not None:
        name, _, flag = name.partition(":")
        if not name or flag not in ("", *NAME_FLAGS):
            raise RefusedError(f"pyxis: --container-name: bad name or flag: {name}:{flag}")
        # `enroot list` is read by words, and a name is a directory.
        if "/" in name or name.split() != [name]:
            raise RefusedError(f"enroot: Invalid argument: pyxis_{name}")
    if not image and not name and given:
        raise RefusedError("pyxis: neither --container-image nor --container-name is set")

    mounts = [_mount(text) for text in given.get("container-mounts", "").split(",") if given]
    env = given.get("container-env", "").split(",")
    for variable in env if "container-env" in given else ():
        # Written into a script of bash as ${NAME}.
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable, re.ASCII):
            raise RefusedError(f"pyxis: --container-env: invalid format: {variable!r}")
    return Container(image, name, given.get("container-workdir"), mounts, env)


def _mount(text: str) -> list[str]:
    """Return source, target and flags of SRC:DST[:FLAGS]."""
    source, colon, rest = text.partition(":")
    target, _, flags = rest.partition(":") if colon else (source, "", "")
    if not source or not target:
        raise RefusedError(f"pyxis: --container-mounts: invalid format: {text!r}")
    if source[0] not in "./" and source not in ("tmpfs", "umount"):
        raise RefusedError(f"pyxis: mount source must be a path: {text!r}")
    if target[0] not in "./":
        raise RefusedError(f"pyxis: mount target must be a path: {text!r}")
    if unknown := set(filter(None, flags.split("+"))) - set(MOUNT_FLAGS.split()):
        raise RefusedError(f"enroot-mount: failed to mount: {source}: {sorted(unknown)}")
    return [source, target, flags]


def is_writable(container: Container, path: Path) -> bool:
    """Return whether a path is at its own place in the container, by a mount without `ro`."""
    # A later mount covers what is below it.
    *_, (source, target, flags) = [("", "", "")] + [
        tuple(mount) for mount in container.mounts if path.is_relative_to(mount[1])
    ]
    return bool(source) and source == target and "ro" not in flags.split("+")


def srun(arguments: list[str]) -> NoReturn:
    """Become the real srun, whose tasks begin with `task`."""
    container, others, command = read(arguments)
    if container.image or container.name:
        for source, _, _ in container.mounts:
            if source.startswith("/") and not Path(source).exists():
                raise RefusedError(
                    f"pyxis: --container-mounts: source path does not exist: {source}"
                )
        command = [sys.executable, "-I", __file__, "task", json.dumps(asdict(container)), *command]
    real = os.environ["REAL_SRUN"]
    os.execv(real, [real, *others, *command])


def task(options: str, *command: str) -> NoReturn:
    """Become the command of a task in its container."""
    container = Container(**json.loads(options))
    node = Path(os.environ["NODES"], os.environ["SLURMD_NODENAME"])
    node.mkdir(parents=True, exist_ok=True)
    with (node / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unpacked = node / f"pyxis_{container.name}"
        if not unpacked.exists():
            _unpack(container, unpacked)
        if not (unpacked / "complete").exists():
            raise RefusedError(f"enroot: no such file or directory: {unpacked}/bin/sh")
    with (node / "used.txt").open("a") as used:
        used.write(f"{unpacked.name} {' '.join(command)}\n")

    variables = dict(os.environ)
    for name in ("LANG", "LANGUAGE", "LC_ALL"):
        if name not in container.env:
            variables.pop(name, None)
    of_image = IMAGE_ENVIRONMENT | {
        "MASTER_ADDR": os.environ["SLURMD_NODENAME"],
        "MASTER_PORT": "61000",
        "WORLD_SIZE": os.environ["SLURM_NTASKS"],
    }
    for name, value in of_image.items():
        if name not in container.env or name not in variables:
            variables[name] = value
    variables |= {"RANK": variables["SLURM_PROCID"], "LOCAL_RANK": variables["SLURM_LOCALID"]}
    # The home is not mounted, unless the site's enroot says so.
    if not any(Path(variables["HOME"]).is_relative_to(target) for _, target, _ in container.mounts):
        variables["HOME"] = "/nowhere/home"
    os.chdir(container.workdir or "/")
    os.execvpe(command[0], command, variables)


def _unpack(container: Container, directory: Path) -> None:
    """Unpack an image, which an end in the middle leaves without `complete`."""
    if not container.image:
        raise RefusedError(f"pyxis: a container with name {directory.name!r} does not exist")
    if container.image[0] in "./" and Path(container.image).read_bytes()[:4] != SQUASHFS:
        raise RefusedError(f"enroot: Invalid image format: {container.image}")
    directory.mkdir()
    if (directory.parent / "die-while-unpacking").exists():
        (directory.parent / "die-while-unpacking").unlink()
        os.kill(os.getpid(), 9)
    (directory / "complete").write_text(container.image)


def enroot(*arguments: str) -> None:
    """Remove an unpacked container."""
    match arguments:
        case ("remove", "--force", name):
            directory = Path(os.environ["NODES"], os.environ["SLURMD_NODENAME"], name)
            if not directory.is_dir():
                raise RefusedError(f"enroot: No such file or directory: {directory}")
            shutil.rmtree(directory)
        case _:
            raise RefusedError(f"enroot: Invalid argument: {' '.join(arguments)}")


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ("srun", *words):
                srun(words)
            case ("task", *words):
                task(*words)
            case ("enroot", *words):
                enroot(*words)
    except (RefusedError, OSError) as error:
        print(f"slurmstepd: error: {error}", file=sys.stderr)
        sys.exit(1)
