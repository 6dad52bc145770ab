"""Workers of test_deepspeed_checkpoints: attempts of the DeepSpeed engine that save and load.

torchrun --nproc-per-node 2 -m tests.train.deepspeed_attempts go_through_two_processes OUT ONE
"""

import shutil
import sys
from pathlib import Path

import torch

from base.files import write_json
from tests.runs import draw_weights
from tests.train.test_deepspeed import batch_of, small_run
from train.data.batches import Batch
from train.engine import StepResult
from train.run.config import RunConfig
from train.run.optimization import Ema, Lawa
from train.run.schedules import learning_rate

SAVED_AT, LAST = 2, 5
AVERAGES = (Ema(decay=0.9), Lawa(interval_steps=1, window=2))


def named(name: str) -> RunConfig:
    """The run of a name: s1 is ZeRO stage 1 in fp32 with averages, b2 stage 2 in bf16."""
    stage = int(name[1])
    return small_run(
        name,
        stage=stage,
        precision={"s": "fp32", "b": "bf16"}[name[0]],
        averages=AVERAGES,
        total_steps=LAST,
    )


class Attempt:
    """One engine and what it does, on every rank."""

    def __init__(self, name: str, root: Path) -> None:
        import torch.distributed as dist

        from train.averages import slot_names
        from train.deepspeed.engine import DeepSpeedEngine
        from train.distributed import start

        device = torch.device("cpu") if dist.is_initialized() else start()
        self.run, self.root = named(name), root
        self.slots = slot_names(self.run)
        self.engine = DeepSpeedEngine(self.run, device)
        draw_weights(self.engine, self.run)

    def train(self, first: int, last: int) -> list[list[float]]:
        return [
            list(
                self.engine.train_step(
                    batch_of(step).of_replica(self.engine.replica),
                    learning_rate(self.run, step),
                    StepResult.is_finite,
                ).figures.values()
            )
            for step in range(first, last + 1)
        ]

    def fill_slots(self) -> None:
        """Slot k becomes k + 2 times the weights."""
        for index, name in enumerate(self.slots):
            for weights, slot in zip(self.engine.weights(), self.engine.slot(name), strict=True):
                slot.copy_(weights).mul_(index + 2)

    def snapshot(self, place: str, weights_only: bool = False):
        directory = self.root / self.run.name / place
        directory.mkdir(parents=True, exist_ok=True)
        return self.engine.snapshot(directory, weights_only=weights_only)

    def save(self, place: str, weights_only: bool = False) -> None:
        import torch.distributed as dist

        snapshot = self.snapshot(place, weights_only)
        assert set(snapshot.write()) <= {
            path.name for path in (self.root / self.run.name / place).iterdir()
        }
        dist.barrier()
        snapshot.seal()

    def reject_steps(self) -> None:
        """A step that is refused, and one whose gradient is not finite."""
        other = Batch.of((batch_of(99).tokens_BS + 1) % 64).of_replica(self.engine.replica)
        self.engine.train_step(other, 1.0, lambda _: False)

        def overflow(_module, _inputs, output):
            output.logits = output.logits * float("nan")
            return output

        hook = self.engine._engine.module.register_forward_hook(overflow)
        overflowed = self.engine.train_step(other, 1.0, StepResult.is_finite)
        hook.remove()
        assert not overflowed.is_finite()

    def refusal(self, source: Path) -> str:
        from base.errors import UserError

        try:
            self.engine.load(source)
        except UserError as error:
            return str(error)
        return ""


def save_at_one_process(root: Path) -> dict:
    """Worker: two runs in one process, saved on their way."""
    report = {}
    for name in ("s1", "s2"):
        attempt = Attempt(name, root)
        attempt.train(1, SAVED_AT)
        attempt.fill_slots()
        attempt.save("sync")
        report[name] = attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.close()
    return report


def go_through_two_processes(root: Path, single: Path) -> dict:
    """Save, continue, resume; then load what one process saved, and what must be refused."""
    import torch.distributed as dist

    report: dict = {}
    for name in ("s1", "s2", "b1", "b2"):
        attempt = Attempt(name, root)
        attempt.train(1, SAVED_AT)
        attempt.fill_slots()
        attempt.save("sync")
        if name == "s1":
            attempt.engine._engine.save_checkpoint(str(root / "own"), tag="step", save_latest=False)
        late = attempt.snapshot("late")
        rows = attempt.train(SAVED_AT + 1, SAVED_AT + 2)
        attempt.reject_steps()
        rows += attempt.train(SAVED_AT + 3, LAST)
        late.write()
        attempt.save("end")
        attempt.save("weights", weights_only=True)
        resumed = Attempt(name, root)
        resumed.train(1, 1)
        resumed.engine.load(root / name / "sync")
        report[name] = {"rows": rows, "resumed": resumed.train(SAVED_AT + 1, LAST)}
        resumed.save("resumed")
        for weights in resumed.engine.weights():
            weights.mul_(0.5)
        resumed.engine.publish_weights()
        resumed.save("halved", weights_only=True)
    for name, source in (("s1", "s1"), ("s2", "s2"), ("s2", "s1")):
        attempt = Attempt(name, root / f"from-{source}")
        attempt.engine.load(single / source / "sync")
        attempt.save("resaved")
        report[f"{name}-from-{source}"] = attempt.train(SAVED_AT + 1, LAST)
    report["no checkpoint"] = attempt.refusal(single)
    torn = root / "torn"
    if dist.get_rank() == 0:
        torn.mkdir()
        shutil.copy(root / "s1" / "sync" / "optimizer-00000-of-00002.safetensors", torn)
    dist.barrier()
    report["one of two files"] = attempt.refusal(torn)
    attempt.engine.close()
    return report


def load_in_one_process(root: Path, two: Path) -> dict:
    """Worker: what two processes saved resumes in one."""
    report: dict = {}
    for name in ("s1", "s2", "b1", "b2"):
        attempt = Attempt(name, root)
        attempt.engine.load(two / name / "sync")
        attempt.save("resaved")
        report[name] = attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.close()
    return report


WORKERS = {
    worker.__name__: worker
    for worker in (save_at_one_process, go_through_two_processes, load_in_one_process)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[2])
    result = WORKERS[sys.argv[1]](*map(Path, sys.argv[2:]))
    write_json(place / "report.json", result)
