"""One step of a study: a command, what it reads and what it leaves.

Commands name places by {python}, {root} and {study}, and what they run on by {launch}, {device},
{sharding} and {cores}: the same step on another machine, or after the study was moved, is the same
text and has the same fingerprint. `study.machine.needs` gives their values.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from base.grouping import grouped

ERROR_PREFIX = "error: "  # begins the one line that a command prints before it fails
COMMAND_PROMPT = "$ "  # begins the line that a log shows before each attempt
TORCHRUN = ("{python}", "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Step:
    """One command, `head + models + specs + tail`.

    Outputs are relative to the study; those that begin with ../ belong to all studies of the root.
    Each is written last by the command and holds the hashes of what it vouches for.
    """

    name: str  # unique in the study and fit for a file name
    kind: str  # steps of one kind take about the same time
    head: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()  # steps that make what it reads
    reads: tuple[str, ...] = ()  # files among their outputs; empty: all of them
    run: str = ""
    models: tuple[str, ...] = ()  # argument that names the model; a process can take several
    specs: tuple[str, ...] = ()  # arguments that name the spec; a process can take several
    tail: tuple[str, ...] = ()
    settings: str = ""  # fingerprint of what decides the outputs besides command and reads
    slots: int = 1  # cores
    resumes: bool = False  # from its own unfinished outputs, which are never removed
    tolerant: bool = False  # of inputs that never come, since a run diverged
    expected_seconds: float = 1.5  # a guess, corrected by what steps of its kind took

    @property
    def command(self) -> tuple[str, ...]:
        """The command of this step alone."""
        return self.head + self.models + self.specs + self.tail

    @property
    def process(self) -> tuple[object, ...]:
        """The values that steps of one process have in common."""
        return self.kind, self.run, self.head, self.tail


@dataclass(frozen=True)
class Machine:
    """The values of a command's placeholders, besides places."""

    launch: tuple[str, ...] = ("{python}",)  # starts a Python program on all ranks of the step
    device: str = "cpu"
    gpus: int = 0  # that the step occupies
    sharding: str = "none"  # fsdp where the ranks of a Hessian product share the model
    cores: int = 1  # for commands that start processes of their own
    python: str = field(default_factory=lambda: sys.executable)


def python(*arguments: str) -> tuple[str, ...]:
    """Return a command that starts a module of this project in one process."""
    return ("{python}", "-m", *arguments)


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the words that start a program on ranks of this machine, at a free port."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return (*TORCHRUN, "--nproc-per-node", str(ranks), *rendezvous)


def _words(command: Sequence[str], machine: Machine, **places: str) -> Iterator[str]:
    """Yield the words of a command with a value for each placeholder that begins one."""
    values = places | {
        "device": machine.device,
        "sharding": machine.sharding,
        "cores": str(machine.cores),
    }
    for argument in command:
        for word in machine.launch if argument == "{launch}" else (argument,):
            # A placeholder begins a word, as in {study}/lr1: the rest stays after its value.
            name, _, rest = word.removeprefix("{").partition("}")
            yield values[name] + rest if word.startswith("{") and name in values else word


def resolve(command: Sequence[str], directory: Path, machine: Machine) -> list[str]:
    """Return a command for the study at `directory`: no placeholders, absolute places."""
    study = directory.absolute()
    places = {"python": machine.python, "root": str(study.parent), "study": str(study)}
    return list(_words(command, machine, **places))


def shown(command: Sequence[str], machine: Machine) -> str:
    """Return a command for people and for a shell, with $STUDY for the study's directory."""
    words = _words(command, machine, python="python", root="$STUDY/..", study="$STUDY")
    return " ".join(
        f'"{word}"' if word.startswith("$STUDY") else shlex.quote(word) for word in words
    )


def shared(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the command that does the work of all these steps, which `batches` put together."""
    first = steps[0]
    # Each once: the steps of a batch are the product of its models and specs.
    models = dict.fromkeys(step.models for step in steps)
    specs = dict.fromkeys(step.specs for step in steps)
    return (
        *first.head,
        *(word for words in models for word in words),
        *(word for words in specs for word in words),
        *first.tail,
    )


def batches(steps: Sequence[Step], models: int, specs: int) -> list[list[Step]]:
    """Return steps by the process that they share, with at most so many models and specs.

    A process measures each of its models with each of its specs. The order is that of the first
    step of each batch; steps without a model are alone.
    """
    # First the specs of one model, then models that have the same specs.
    by_model = grouped(
        steps, lambda step: (step.process, step.models) if step.models else step.name
    )
    by_specs: dict[object, list[list[Step]]] = {}
    for of_model in by_model.values():
        for start in range(0, len(of_model), specs):
            part = of_model[start : start + specs]
            # The name keeps a step without a model out of the batches of others.
            alone = "" if part[0].models else part[0].name
            alike = (part[0].process, alone, tuple(step.specs for step in part))
            by_specs.setdefault(alike, []).append(part)
    return [
        [step for part in parts[start : start + models] for step in part]
        for parts in by_specs.values()
        for start in range(0, len(parts), models)
    ]


def log_path(directory: Path, step: Step) -> Path:
    """Return STUDY/logs/STEP.log: all that the step printed; of a batch, that of its first step."""
    return directory / "logs" / f"{step.name}.log"


def last_error(log: Path, start: int) -> str | None:
    """Return the last 'error: ...' line a step wrote to its log after byte `start`."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(ERROR_PREFIX)), None)
