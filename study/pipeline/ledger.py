"""The steps of a study that are complete, by what they were made from: content, never time.

A run that diverged is complete with the checkpoints before: training it again does the same. What
later ones were for is left out, and table, report and MLflow are made of the rest. Local runner,
SLURM and status all ask here.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from base.aligned import wrapped
from base.errors import UserError
from base.files import sha256_of, write_json
from base.grouping import grouped
from base.reading import read_object, read_sealed
from ckpt_tools.hf.directory import DOWNLOAD_JSON, LINEAGE_JSON, RESULT_JSON
from study.paths import MLFLOW_STORE
from study.step import Step
from train.run.directory import CHECKPOINT_JSON, RunDirectory, step_of
from train.run.status import Status, divergence


class Ledger:
    """Complete steps: STUDY/steps/STEP.json holds what a step finished with."""

    def __init__(self, directory: Path, steps: list[Step]) -> None:
        self.directory = directory
        self.steps = {step.name: step for step in steps}
        self.records = directory / "steps"
        self._hashed: dict[Path, tuple[tuple[int, int], str]] = {}
        self._places: dict[str, Path] = {}  # thousands of steps read the same text
        self._lost: dict[str, str] | None = None

    def divergence(self, step: Step) -> Status | None:
        """Return how the training of a step diverged; None for any other step."""
        if step.kind != "train":
            return None
        return divergence(RunDirectory(self.directory / step.run), step.settings)

    @property
    def lost(self) -> dict[str, str]:
        """The outputs that never come, relative to the study, and why: 'lr1 diverged at step 2'."""
        if self._lost is None:
            # Assigned empty and filled in order: `left_out` reads what earlier steps have lost.
            self._lost = lost = {}
            for step in self.steps.values():
                status, reason = self.divergence(step), self.left_out(step)
                if status:
                    reason = f"{step.run} diverged at step {status.step}"
                for output in step.outputs if reason else ():
                    # Checkpoints from before the divergence are there and count.
                    if not status or step_of(Path(output).parent.name) >= status.step:
                        lost[output] = str(reason)
        return self._lost

    def look_again(self) -> None:
        """Forget which outputs never come, after a training has ended."""
        self._lost = None

    def left_out(self, step: Step) -> str | None:
        """Return why a step is left out for good; None for one that is to be made, or was."""
        # Table, report and mirror are made of what there is.
        if step.tolerant:
            return None
        return next((self.lost[name] for name in self._inputs(step) if name in self.lost), None)

    def outputs(self, step: Step) -> list[str]:
        """Return the outputs of a step but those that never come."""
        return [name for name in step.outputs if name not in self.lost]

    def _inputs(self, step: Step) -> list[str]:
        return list(step.reads) or [
            output for name in step.after for output in self.steps[name].outputs
        ]

    def reads(self, step: Step) -> list[str]:
        """Return the files that a step reads of what others made, relative to the study."""
        names = self._inputs(step)
        return [name for name in names if name not in self.lost] if step.tolerant else names

    def _place(self, name: str) -> Path:
        if name not in self._places:
            self._places[name] = self.directory / name
        return self._places[name]

    def missing(self, step: Step) -> list[str]:
        """Return what it reads and is not there yet."""
        return [name for name in self.reads(step) if not self._place(name).is_file()]

    def fingerprint(self, step: Step) -> str:
        """Return 16 hex digits of a hash of the command, its settings, and what the step reads.

        What it reads holds the hashes of the large files beside it, so a changed checkpoint or text
        changes this too; where the study is does not.
        """
        return self._fingerprint(step, self._hashes(self.reads(step)))

    def _fingerprint(self, step: Step, reads: dict[str, str]) -> str:
        content = {"command": step.command, "settings": step.settings, "reads": reads}
        # A table or report that leaves runs out is another one: what is lost counts as input.
        if step.tolerant and self.lost:
            content["lost"] = sorted(set(self.lost.values()))
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def missing_outputs(self, step: Step) -> list[str]:
        """Return its outputs that are not there."""
        return [name for name in self.outputs(step) if not (self.directory / name).is_file()]

    def fault(self, step: Step) -> str | None:
        """Return in words why a step whose command ended is not complete; None where it is."""
        missing = self.missing_outputs(step)
        if missing:
            outputs = self.outputs(step)
            later = {*outputs[outputs.index(missing[0]) :]} - {*missing}
            # A training that resumes from a later checkpoint never comes back to this one.
            beyond = f": {remedy(step.kind)}" if step.kind == "train" and later else ""
            return f"it ended without {missing[0]}{beyond}"
        places = (self.directory / name for name in self.outputs(step))
        faults = (changed_record(path, step.kind) for path in places)
        return next((words for words in faults if words), None)

    def record(self, step: Step) -> dict[str, Any] | None:
        """Return what was recorded when the step last finished; None without a readable record."""
        path = self.records / f"{step.name}.json"
        try:
            return read_object(path)
        except (FileNotFoundError, UserError):
            return None

    def is_complete(self, step: Step) -> bool:
        """Return whether the outputs are of this very step, made from what it would read now."""
        return self.reason(step) is None

    def reason(self, step: Step) -> str | None:
        """Return why a step is not complete, in words; None for one that is."""
        record = self.record(step)
        if record is None:
            return "not run yet"
        damage = self._damage(step, record)
        if damage:
            return damage
        try:
            hashes = self._hashes(self.reads(step))
        except FileNotFoundError as error:
            return _missing(error)
        if record.get("fingerprint") == self._fingerprint(step, hashes):
            return None
        # Not complete, by the fingerprint; all that follows only finds the words for it.
        if record.get("command") != list(step.command):
            return "its command has changed"
        # Which input it was: the fingerprint alone only tells that there is one.
        inputs = record.get("reads") or {}
        changed = [name for name, sha256 in hashes.items() if inputs.get(name) != sha256]
        return f"{changed[0]}, which it reads, has changed" if changed else "its settings changed"

    def damage(self, step: Step) -> str | None:
        """Return what is wrong with the files that a complete step left, and what to do."""
        record = self.record(step)
        return self._damage(step, record) if record else None

    def _damage(self, step: Step, record: dict[str, Any]) -> str | None:
        try:
            outputs = self._hashes(self.outputs(step))
        except FileNotFoundError as error:
            return _missing(error)
        recorded = record.get("outputs")
        for name in self._own(step):
            if not isinstance(recorded, dict) or recorded.get(name) != outputs[name]:
                return f"{self.directory / name} is not what the step left; {remedy(step.kind)}"
        # Beyond the records themselves: large files that these vouch for, by their sizes.
        for name in outputs:
            file = gone(self._place(name), step.kind)
            if file:
                return f"{file.resolve()} is missing or cut off; {remedy(step.kind)}"
        return None

    def _own(self, step: Step) -> list[str]:
        """Return the step's own outputs; what belongs to all studies may change under each."""
        return [output for output in self.outputs(step) if not output.startswith("../")]

    def _hashes(self, names: list[str]) -> dict[str, str]:
        return {name: self._sha256(self._place(name)) for name in names}

    def _sha256(self, path: Path) -> str:
        """Return the hash of a file, computed again only where size or time of change differ."""
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        entry = self._hashed.get(path)
        if entry is None or entry[0] != state:
            entry = self._hashed[path] = (state, sha256_of(path))
        return entry[1]

    def prepare(self, step: Step) -> None:
        """Remove what an earlier execution left, so that it cannot pass for the new one."""
        # The record first: a crash in between leaves an open step, never a record without files.
        (self.records / f"{step.name}.json").unlink(missing_ok=True)
        if not step.resumes:
            for output in self._own(step):
                (self.directory / output).unlink(missing_ok=True)

    def finish(self, step: Step, fingerprint: str, seconds: float) -> None:
        """Record that the step finished."""
        self.records.mkdir(parents=True, exist_ok=True)
        record = {
            "fingerprint": fingerprint,
            "outputs": self._hashes(self._own(step)),
            "reads": self._hashes(sorted({*self.reads(step)} - {*self.missing(step)})),
            "seconds": round(seconds, 3),
            "command": list(step.command),
        }
        write_json(self.records / f"{step.name}.json", record)

    def complete_steps(self) -> set[str]:
        """Return the names of the complete steps; a step counts only if all before it do."""
        # In the order of the study, so whatever a step comes after is decided before it.
        complete, left_out = set[str](), self.steps_left_out().keys()
        for step in self.steps.values():
            before = set(step.after) - left_out
            if step.name not in left_out and before <= complete and self.is_complete(step):
                complete.add(step.name)
        return complete

    def steps_left_out(self) -> dict[str, str]:
        """Return the steps that are left out for good, by name, and why."""
        reasons = {step.name: self.left_out(step) for step in self.steps.values()}
        return {name: reason for name, reason in reasons.items() if reason}


def _missing(error: FileNotFoundError) -> str:
    path = Path(error.filename).resolve()
    return f"{path} is missing; copy it from where the study was made, or run"


SEALED = (CHECKPOINT_JSON, LINEAGE_JSON, DOWNLOAD_JSON, RESULT_JSON)


def remedy(kind: str) -> str:
    """Return what to do about a damaged output of a step of this kind.

    Training makes its newest checkpoint again by itself, and no earlier one: that would cost all
    later ones without a question.
    """
    if kind == "train":
        return (
            "restore it, or move it and the checkpoints after it away: 'python -m study run' trains"
            " from the one before"
        )
    return "'python -m study run' makes it again"


def changed_record(output: Path, kind: str) -> str | None:
    """Return what is wrong with a record that a step of a kind left; None for a sound one."""
    if output.name not in SEALED:
        return None
    try:
        read_sealed(output, remedy(kind))
    except UserError as error:
        return str(error)
    return None


def gone(output: Path, kind: str) -> Path | None:
    """Return the first file that an unchanged record vouches for and that is not there whole.

    By existence and size: hashes of models and texts are compared where they are read. Shards of a
    checkpoint are not looked for, since nothing but an export reads them. `kind` is that of the
    step that left the record.
    """
    if kind in ("export", "average", "download") and output.name in (LINEAGE_JSON, DOWNLOAD_JSON):
        files = read_object(output).get("files", {})
    elif kind == "prepare":
        content = read_object(output)
        files = {f"{output.stem}.{key}": content[key] for key in ("bin", "idx") if key in content}
    elif kind == "mirror":
        store = output.parents[1] / MLFLOW_STORE
        # A store elsewhere, such as a server, cannot be looked for on this disk.
        is_own = str(read_object(output).get("store")).endswith(f"/{MLFLOW_STORE}")
        return store if is_own and not store.is_file() else None
    else:
        return None

    for name, record in files.items():
        path: Path = output.parent / name
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            return path
    return None


FILES_SHOWN = 3  # damaged ones, and runs that diverged, on one screen


def status_lines(ledger: Ledger, *, whole: bool = False) -> Iterator[str]:
    """Yield how many steps are complete, the kinds that are, and a line per other kind.

    Of those the first step that is open, and why; then damaged files and runs that diverged. Steps
    left out are none to wait for. `whole` is with a line for every kind and every file.
    """
    steps = list(ledger.steps.values())
    complete, left_out = ledger.complete_steps(), ledger.steps_left_out()
    ended = complete | left_out.keys()
    yield f"{len(complete)}/{len(steps)} steps complete in {ledger.directory}"

    by_kind = grouped(steps, lambda step: step.kind)
    done = [] if whole else [k for k, each in by_kind.items() if _names(each) <= complete]
    if done:
        yield from wrapped(f"complete: {', '.join(f'{k} {len(by_kind[k])}' for k in done)}")
    for kind in [kind for kind in by_kind if kind not in done]:
        of_kind = by_kind[kind]
        line = f"{kind:10} {len(_names(of_kind) & complete)}/{len(of_kind)}"
        reasons = [left_out[step.name] for step in of_kind if step.name in left_out]
        if reasons:
            line += f"  {left_out_words(reasons)}"
        first = next((step for step in of_kind if step.name not in ended), None)
        if first:
            awaited = [f"waits for {name}" for name in first.after if name not in ended]
            line += f"  next: {first.name}: {awaited[0] if awaited else ledger.reason(first)}"
        yield line

    damaged = [f"damaged: {words}" for step in steps if (words := ledger.damage(step))]
    yield from _first(damaged, "damaged files", whole)
    diverged = [status.words for step in steps if (status := ledger.divergence(step))]
    again = "that is a result, it is not trained again"
    yield from _first([f"{words}; {again}" for words in diverged], "that diverged", whole)


def _names(steps: Iterable[Step]) -> set[str]:
    return {step.name for step in steps}


def _first(lines: Iterable[str], what: str, whole: bool) -> Iterator[str]:
    """Yield different lines, of many the first and how many more there are."""
    lines = list(dict.fromkeys(lines))
    shown = lines if whole else lines[:FILES_SHOWN]
    yield from shown
    if len(shown) < len(lines):
        yield f"and {len(lines) - len(shown)} more {what}; --all names them"


def left_out_words(reasons: list[str]) -> str:
    """Return '3 left out: lr1 diverged at step 2', with every reason once."""
    return f"{len(reasons)} left out: {'; '.join(dict.fromkeys(reasons))}"
