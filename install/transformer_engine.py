"""`make transformer-engine`: its wheels into .venv, and its binding to torch, compiled here.

`.venv/bin/python -m install.transformer_engine` runs under the Python of .venv. It needs a C++
compiler and Python's headers. CUDA's headers come as wheels: neither nvcc nor CUDA's toolkit is
needed, nor a GPU.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from base.libraries.locks import pins_of
from install.settings import RefusedError

LOCK = Path("transformer-engine.lock")
BINDING = "transformer-engine-torch"  # of all packages the one without a wheel
COMPILED_WITH = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "wheel")
CUDA = 13  # the major version that the lock is for
# Measured with g++ 12.2 on a Xeon, where two compilers took 423 s: time of one core, and memory
# that the largest of 33 files takes.
COMPILER_SECONDS, COMPILER_BYTES = 850, 3_500_000_000
# Wheels; these unpacked, with the binding and what is kept while it is compiled.
DOWNLOAD_BYTES, DISK_BYTES = 303_000_000, 1_000_000_000


@dataclass(frozen=True)
class BuildMachine:
    """Properties of this machine that compiling depends on.

    Attributes:
        cuda: version that the torch of .venv was built for, None for a torch without CUDA.
        compiler: path of the C++ compiler.
        python_header: whether Python.h is there.
        cuda_headers: whether the libraries of torch are wheels, which bring their headers.
        cores: that this process may use.
        free_memory, free_disk: bytes; of memory within the limits of a container or job.
    """

    cuda: str | None
    compiler: str | None
    python_header: bool
    cuda_headers: bool
    cores: int
    free_memory: int
    free_disk: int

    @property
    def jobs(self) -> int:
        """Compilers at once: as many as there are cores and memory for."""
        return max(1, min(self.cores, self.free_memory // COMPILER_BYTES))


def this_machine() -> BuildMachine:
    """Return the machine that this runs on; torch is asked, which takes seconds."""
    import torch

    from base.host_memory import free_memory

    header = Path(sysconfig.get_path("include"), "Python.h")
    wheels = Path(sysconfig.get_path("purelib"), "nvidia", f"cu{CUDA}", "include")
    return BuildMachine(
        cuda=torch.version.cuda,
        compiler=shutil.which("c++"),
        python_header=header.exists(),
        cuda_headers=(wheels / "cuda_runtime.h").exists(),
        cores=len(os.sched_getaffinity(0)),
        free_memory=free_memory(),
        free_disk=shutil.disk_usage(".").free,
    )


def check(machine: BuildMachine) -> None:
    """Raise RefusedError where this machine cannot compile the binding, or not use it."""
    if machine.cuda is None:
        raise RefusedError(
            "the torch of .venv is for CPUs; run make -B venv TORCH_INDEX= for one with CUDA 13"
        )
    if int(machine.cuda.partition(".")[0]) != CUDA:
        raise RefusedError(
            f"the torch of .venv is for CUDA {machine.cuda}, whose cuDNN is older than the 9.12"
            " that Transformer Engine needs; train with kernels 'torch'"
        )
    if not machine.cuda_headers:
        raise RefusedError(
            "the torch of .venv brings no headers of CUDA, it is a container's or the system's;"
            " install transformer-engine beside that torch"
        )
    if machine.compiler is None:
        raise RefusedError("no C++ compiler c++ on PATH; run apt-get install g++")
    if not machine.python_header:
        raise RefusedError(
            "Python.h is missing; run apt-get install python3-dev for the Python of .venv"
        )
    if machine.free_disk < DISK_BYTES:
        raise RefusedError(
            f"this takes {DISK_BYTES / 1e9:.1f} GB of disk and {machine.free_disk / 1e9:.1f} GB are"
            " free here; free some"
        )


def summary(machine: BuildMachine) -> str:
    """Return what will happen, in one line."""
    minutes = COMPILER_SECONDS / machine.jobs / 60
    compilers = f"{machine.jobs} compiler{'s' if machine.jobs > 1 else ''}"
    return (
        f"Transformer Engine for CUDA {machine.cuda}: {DOWNLOAD_BYTES / 1e6:.0f} MB to download,"
        f" {DISK_BYTES / 1e9:.1f} GB of disk, then about {minutes:.0f} minutes with {compilers} of"
        f" {COMPILER_BYTES / 1e9:.1f} GB"
    )


def build_environment(environment: Mapping[str, str], jobs: int, temporary: Path) -> dict[str, str]:
    """Return the variables that the binding is compiled with.

    Its setup would look for a binary on the network first, for headers in a toolkit of any
    version, and for its own commit in the git repository around it.
    """
    programs = Path(sys.executable).parent  # ninja, without which one compiler runs at a time
    settings = {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        "NVTE_NO_LOCAL_VERSION": "1",
        "MAX_JOBS": str(jobs),
        "TMPDIR": str(temporary),
        "PATH": f"{programs}{os.pathsep}{environment.get('PATH', os.defpath)}",
    }
    searched = ("CUDA_HOME", "CUDA_PATH", "CPLUS_INCLUDE_PATH", "CPATH")
    return {name: environment[name] for name in environment if name not in searched} | settings


def steps(wheels: Path) -> dict[str, list[str]]:
    """Return pip's commands by name, in their order; `wheels` is where files are kept meanwhile.

    The package is installed last and at once: without its binding, megatron-core cannot be
    imported, whatever the kernels.
    """
    pins = {name: f"{name}=={version}" for name, version in pins_of(LOCK).items()}
    others = [pin for name, pin in pins.items() if name != BINDING]
    to_compile = [pins[name] for name in COMPILED_WITH]

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    as_wheels = ["--no-deps", "--only-binary", ":all:"]
    kept = ["--no-deps", "--no-index", "--find-links", str(wheels)]
    compiled = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), pins[BINDING]]
    return {
        "downloading": [*pip, "download", *as_wheels, "--dest", str(wheels), *others],
        "headers": [*pip, "install", *kept, *to_compile],
        "compiling": [*pip, "wheel", *compiled],
        "installing": [*pip, "install", *kept, *pins.values()],
    }


def install(machine: BuildMachine) -> None:
    """Download the wheels, compile the binding, then install all.

    Raises:
        RefusedError: pip or the compiler failed; .venv has the headers at most besides what it had.
    """
    temporary = Path(".venv/tmp").resolve()
    temporary.mkdir(exist_ok=True)
    variables = build_environment(os.environ, machine.jobs, temporary)
    try:
        for step, command in steps(temporary / "wheels").items():
            began_at = time.monotonic()
            if subprocess.run(command, env=variables, check=False).returncode:
                raise RefusedError(f"{step} failed, see above; run make transformer-engine again")
            print(f"{step}: {time.monotonic() - began_at:.0f} s", flush=True)
    finally:
        shutil.rmtree(temporary)


def main() -> None:
    """Install Transformer Engine, or end with one line and exit code 2."""
    if importlib.util.find_spec("pip") is None:
        command = [sys.executable, "-m", "ensurepip"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    try:
        machine = this_machine()
        check(machine)
        print(summary(machine), flush=True)
        install(machine)
    except RefusedError as refused:
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
