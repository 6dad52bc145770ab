"""One step of a study: a command, what it reads and what it leaves behind.

Commands name places by {python}, {root} and {study}, and what they run on by {launch}, {device}, {sharding} and
{cores}: the same step on another machine, or after the study was moved, is the same text and has the same fingerprint.
`study.needs` says what those stand for.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND_PROMPT = "$ "  # begins the line that a log shows before each attempt
ONLINE = ("download", "prepare")  # kinds of steps that may reach the network
TORCHRUN = ("{python}", "-m", "torch.distributed.run")


@dataclass(frozen=True)
class Step:
    """One command, `head + models + specs + tail`.

    Attributes:
        name: unique in the study and fit for a file name.
        kind: steps of one kind take about the same time.
        head: arguments with placeholders; all of the command but for steps that can share a process.
        outputs: files, relative to the study, each written last by the command and holding the hashes of what it
            vouches for. Those that begin with ../ belong to all studies of the root.
        after: names of the steps that make what it reads.
        reads: the files among their outputs that it reads; empty: all of them.
        run: the run it belongs to, if any.
        models: argument that names the model it measures; a process can take several.
        specs: arguments that name the spec; a process can take several.
        tail: arguments behind those.
        settings: what decides the outputs besides the command and what it reads, as a fingerprint.
        slots: cores it occupies.
        resumes: it goes on from its own unfinished outputs, which are therefore never removed.
        expected_seconds: a first guess for the ETA, corrected by what steps of its kind took.
    """

    name: str
    kind: str
    head: tuple[str, ...]
    outputs: tuple[str, ...]
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    run: str = ""
    models: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    settings: str = ""
    slots: int = 1
    resumes: bool = False
    expected_seconds: float = 5.0

    @property
    def command(self) -> tuple[str, ...]:
        """The command of this step alone."""
        return self.head + self.models + self.specs + self.tail

    @property
    def process(self) -> tuple[object, ...]:
        """Steps may share a process if this is the same."""
        return self.kind, self.run, self.head, self.tail


@dataclass(frozen=True)
class Machine:
    """What the placeholders of a command stand for, besides places.

    Attributes:
        launch: words that start a Python program on all ranks of the step.
        device: cpu or cuda.
        gpus: that the step occupies.
        sharding: none, or fsdp where the ranks of a Hessian product share the model.
        cores: for commands that start processes of their own.
        python: the interpreter.
    """

    launch: tuple[str, ...] = ("{python}",)
    device: str = "cpu"
    gpus: int = 0
    sharding: str = "none"
    cores: int = 1
    python: str = sys.executable


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the words that start a program on ranks of this machine, at a free port: studies run side by side."""
    return (*TORCHRUN, "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def _values(machine: Machine) -> dict[str, str]:
    """Return what the placeholders that are whole words stand for."""
    return {"{device}": machine.device, "{sharding}": machine.sharding, "{cores}": str(machine.cores)}


def resolve(command: Sequence[str], directory: Path, machine: Machine) -> list[str]:
    """A command for the study at `directory`, placeholders replaced and places absolute."""
    study = directory.absolute()
    places = {"{python}": machine.python, "{root}": str(study.parent), "{study}": str(study)}
    places |= _values(machine)
    resolved = []
    for argument in command:
        if argument == "{launch}":
            resolved += resolve(machine.launch, directory, machine)
            continue
        for placeholder, place in places.items():
            if argument == placeholder or argument.startswith(f"{placeholder}/"):
                argument = place + argument.removeprefix(placeholder)
                break
        resolved.append(argument)
    return resolved


def shared(steps: Sequence[Step]) -> tuple[str, ...]:
    """The command that does the work of all these steps, which `batches` put together."""
    first = steps[0]
    models = dict.fromkeys(step.models for step in steps)
    specs = dict.fromkeys(step.specs for step in steps)
    return (
        *first.head,
        *(word for one in models for word in one),
        *(word for one in specs for word in one),
        *first.tail,
    )


def batches(steps: Sequence[Step], models: int, specs: int) -> list[list[Step]]:
    """Steps that share a process, at most so many models and specs in each: every model of one with every spec of it.

    The order is that of the first step of each batch; steps without a model are alone.
    """
    wanted: dict[tuple[object, ...], list[Step]] = {}
    for step in steps:
        wanted.setdefault(step.process if step.models else (step.name,), []).append(step)
    found: list[list[Step]] = []
    for members in wanted.values():
        by_model: dict[tuple[str, ...], list[Step]] = {}
        for step in members:
            by_model.setdefault(step.models, []).append(step)
        by_specs: dict[tuple[tuple[str, ...], ...], list[list[Step]]] = {}
        for own in by_model.values():
            for start in range(0, len(own), specs):
                part = own[start : start + specs]
                by_specs.setdefault(tuple(step.specs for step in part), []).append(part)
        for alike in by_specs.values():
            for start in range(0, len(alike), models):
                found.append([step for part in alike[start : start + models] for step in part])
    return found


def log_path(directory: Path, step: Step) -> Path:
    """STUDY/logs/STEP.log: everything the step printed, over all attempts; of a batch, that of its first step."""
    return directory / "logs" / f"{step.name}.log"


def shown(command: Sequence[str], machine: Machine) -> str:
    """A command for people and for a shell: plain 'python', and $STUDY for the study's directory."""
    words = []
    for argument in command:
        if argument == "{launch}":
            words.append(shown(machine.launch, machine))
            continue
        place, _, rest = argument.partition("}")
        if place in ("{study", "{root"):
            words.append(f'"$STUDY{"/.." if place == "{root" else ""}{rest}"')
        elif argument in _values(machine):
            words.append(_values(machine)[argument])
        else:
            words.append("python" if argument == "{python}" else shlex.quote(argument))
    return " ".join(words)
