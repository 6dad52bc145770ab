"""The steps of a study that are complete, by what they were made from: content, never time."""

import hashlib
import json
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import sha256_of, write_json
from base.reading import read_object
from study.pipeline.step import Step


class Ledger:
    """Complete steps: STUDY/steps/STEP.json holds what a step finished with."""

    def __init__(self, directory: Path, steps: list[Step]) -> None:
        self.directory = directory
        self.steps = {step.name: step for step in steps}
        self.records = directory / "steps"
        self._hashed: dict[Path, tuple[tuple[int, int], str]] = {}
        self._places: dict[str, Path] = {}  # thousands of steps read the same text

    def reads(self, step: Step) -> list[str]:
        """Return the files that a step reads of what others made, relative to the study."""
        return list(step.reads) or [
            output for name in step.after for output in self.steps[name].outputs
        ]

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
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def missing_outputs(self, step: Step) -> list[str]:
        """Return its outputs that are not there."""
        return [name for name in step.outputs if not (self.directory / name).is_file()]

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
        try:
            outputs = self._hashes([*step.outputs])
            hashes = self._hashes(self.reads(step))
        except FileNotFoundError as error:
            place = Path(error.filename).resolve()
            return f"{place} is missing; copy it from where the study was made, or run"
        recorded = record.get("outputs")
        for name in self._own(step):
            if not isinstance(recorded, dict) or recorded.get(name) != outputs[name]:
                return f"{name} is not what the step left; run makes it again"
        if record.get("fingerprint") == self._fingerprint(step, hashes):
            return None
        if record.get("command") != list(step.command):
            return "its command has changed"
        inputs = record.get("reads") or {}
        changed = [name for name, sha256 in hashes.items() if inputs.get(name) != sha256]
        return f"{changed[0]}, which it reads, has changed" if changed else "its settings changed"

    def _own(self, step: Step) -> list[str]:
        """Return the step's own outputs; what belongs to all studies may change under each."""
        return [output for output in step.outputs if not output.startswith("../")]

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
        complete: set[str] = set()
        for step in self.steps.values():
            if complete.issuperset(step.after) and self.is_complete(step):
                complete.add(step.name)
        return complete
