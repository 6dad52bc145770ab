"""Steps that are a few lines of Python, and a runner of them."""

from pathlib import Path

from study.machine.hardware import Hardware
from study.pipeline.runner import Runner, locked
from study.step import Step


def command(code: str) -> tuple[str, ...]:
    """A command that runs these lines; sys.argv[1] is the study's directory."""
    return ("{python}", "-I", "-S", "-c", code, "{study}")


def python_step(name: str, code: str, outputs: tuple[str, ...] = (), **fields) -> Step:
    """A step that runs these lines, and leaves NAME.json if nothing else is said."""
    return Step(name, "test", command(code), outputs or (f"{name}.json",), **fields)


def noting(name: str, more: str = "pass") -> str:
    """Code that notes its start in order.txt and leaves NAME.json."""
    return (
        "import sys, time, os, pathlib\n"
        "study = pathlib.Path(sys.argv[1])\n"
        f"(study / 'order.txt').open('a').write('{name}\\n')\n"
        f"{more}\n"
        f"(study / '{name}.json').write_text('{{}}')\n"
    )


def order(directory: Path) -> list[str]:
    """Names of the steps in the order in which they started."""
    return (directory / "order.txt").read_text().split()


def run_steps(directory: Path, steps: list[Step], workers: int = 1) -> Runner:
    """Run them to their end."""
    with locked(directory) as lock_fd:
        runner = Runner(directory, steps, Hardware(workers), lock_fd)
        runner.run()
    return runner
