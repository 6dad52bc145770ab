"""Which steps of a study are complete, by what they were made from: a step whose command or input changed is not."""

import hashlib
import json
from pathlib import Path
from typing import Any

from study.commands import Step
from train.run_directory import sha256_of, write_json


class Ledger:
    """Which steps of a study are complete: STUDY/steps/STEP.json holds the fingerprint a step finished with."""

    def __init__(self, directory: Path, steps: list[Step]) -> None:
        self.directory = directory
        self.steps = {step.name: step for step in steps}
        self.records = directory / "steps"

    def reads(self, step: Step) -> list[str]:
        """The files that a step reads of what others made, relative to the study."""
        return list(step.reads) or [output for name in step.after for output in self.steps[name].outputs]

    def missing(self, step: Step) -> list[str]:
        """What it reads and is not there yet."""
        return [name for name in self.reads(step) if not (self.directory / name).is_file()]

    def fingerprint(self, step: Step) -> str:
        """SHA-256 (16 hex digits) of the command, its settings, and the contents of what it reads.

        What it reads holds the hashes of the large files beside it, so a changed checkpoint or text changes this too;
        where the study lies does not.
        """
        reads = {name: sha256_of(self.directory / name) for name in self.reads(step)}
        content = {"command": step.command, "settings": step.settings, "reads": reads}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def outputs_exist(self, step: Step) -> bool:
        """Whether every output is there."""
        return all((self.directory / output).is_file() for output in step.outputs)

    def record(self, step: Step) -> dict[str, Any] | None:
        """What was recorded when the step last finished; None where nothing readable was."""
        path = self.records / f"{step.name}.json"
        try:
            return dict(json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def is_complete(self, step: Step) -> bool:
        """Whether the outputs are those of this very step, made from what it would read now."""
        record = self.record(step)
        return (
            record is not None
            and self.outputs_exist(step)
            and not self.missing(step)
            and record.get("outputs") == self._hashes(step)
            and record.get("fingerprint") == self.fingerprint(step)
        )

    def _hashes(self, step: Step) -> dict[str, str]:
        """SHA-256 of the step's own outputs; what belongs to all studies of the root may change under each."""
        return {output: sha256_of(self.directory / output) for output in step.outputs if not output.startswith("../")}

    def prepare(self, step: Step) -> None:
        """Removes what an earlier, different or unfinished, execution left, so that it cannot pass for the new one."""
        (self.records / f"{step.name}.json").unlink(missing_ok=True)
        if not step.resumes:
            for output in step.outputs:
                if not output.startswith("../"):  # what belongs to all studies
                    (self.directory / output).unlink(missing_ok=True)

    def finish(self, step: Step, fingerprint: str, seconds: float) -> None:
        """Records that the step finished."""
        self.records.mkdir(parents=True, exist_ok=True)
        record = {
            "fingerprint": fingerprint,
            "outputs": self._hashes(step),
            "seconds": round(seconds, 3),
            "command": list(step.command),
        }
        write_json(self.records / f"{step.name}.json", record)

    def complete_steps(self) -> set[str]:
        """Names of the complete steps, where a step counts only if all before it do."""
        complete: set[str] = set()
        for step in self.steps.values():
            if complete.issuperset(step.after) and self.is_complete(step):
                complete.add(step.name)
        return complete
