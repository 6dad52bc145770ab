"""The training loop. What varies with time is a function of the step: resuming is starting later.

The verbs of an engine are in `train.engine`; what a checkpoint is, and when it is complete, in
`train.checkpoints`.
"""

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from base import stopping
from base.environment import is_rank_zero
from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from base.progress import Progress
from train.averages import Averages
from train.checkpoints.attempt import Attempt, SupersededError
from train.checkpoints.resuming import resume
from train.checkpoints.saving import Saver, remove_unfinished
from train.data.batches import Batch
from train.distributed import start
from train.engine import Engine, StepResult
from train.engines import build_engine
from train.monitoring import RANKS_EVERY_STEPS, Profile, RankClock, speed_of
from train.observing import forward_figures, observed_step
from train.perturbing import train_step_of
from train.rounding import QuantizationProbe
from train.run.config import RunConfig, dump_run
from train.run.directory import PROBE_SEQUENCES, PROBE_TOKENS, CheckpointRecord, RunDirectory
from train.run.launch import Launch
from train.run.metrics import HELD_OUT_LOSS, MetricsWriter
from train.run.schedules import learning_rate
from train.run.status import Ending
from train.run_data import Prefetch, RunData, open_data
from train.running.agreement import Agreement
from train.running.watchdog import LoopPhase, Watchdog
from train.spikes import DivergedError, StepJudge


class _Training:
    """One attempt of one run on this rank."""

    def __init__(self, run: RunConfig, directory: RunDirectory, data: RunData) -> None:
        self.run, self.directory, self.data = run, directory, data
        device = start()
        self.engine: Engine = build_engine(run, device)
        replica, held_out = self.engine.replica, data.held_out()
        # Every replica evaluates its own share of the held-out sequences.
        self.held_out = {use: batch.of_replica(replica) for use, batch in held_out.items()}
        tokens = min(PROBE_TOKENS, run.data.sequence_length)
        first_BS = held_out["held_out"].tokens_BS[:PROBE_SEQUENCES]
        self.probe_BS, self.observed = first_BS[:, :tokens], Batch.of(first_BS)
        self.quantization = QuantizationProbe(run, self.engine, held_out["held_out"])

        def read(step: int) -> Batch:
            batch = data.batch(step, replica)
            return batch.pinned() if device.type == "cuda" else batch

        self.batches = Prefetch(read, run.total_steps)
        self.attempt = Attempt(directory, fingerprint(run), self.engine.layout)
        self.metrics: MetricsWriter | None = None
        self.step = 0
        self.loss: float | None = None  # held-out, of the last evaluation

    def begin(self, launch: Launch) -> CheckpointRecord | None:
        """Load the newest checkpoint, or the origin of the run; set up what logs and saves.

        Return the record of the checkpoint, None at the initial weights.
        """
        run, directory = self.run, self.directory
        if dist.get_rank() == 0:
            # This attempt is the newest by now: what an older one left unfinished may go.
            write_json(directory.run_json, dump_run(run))
            remove_unfinished(directory)
            self.metrics = MetricsWriter(directory.metrics, self.attempt.number)
        self.step, record, quarantined = resume(
            self.engine, run, directory, data_sha256=self.data.sha256, attempt=self.attempt.number
        )
        self.loss = record.held_out_loss if record else None
        self.profile = Profile(launch.profiled_steps, directory.profile)
        self.profile.check(self.step, run.total_steps)
        self.attempt.amend(
            resumed_from_step=self.step if record else None,
            quarantined=quarantined,
            kernels=self.engine.kernels,
        )
        for step in quarantined:
            self.log(step, quarantined=1)

        # A new average starts here; one of the checkpoint keeps its start.
        saved_starts = record.average_starts if record else {}
        starts = {
            average.name: saved_starts.get(average.name, self.step) for average in run.averages
        }
        self.averages = Averages(run, self.engine, starts)
        self.judge = StepJudge(run, record)
        self.saver = Saver(
            run.saving, self.engine, directory, self.attempt, self.probe_BS, self.log
        )
        self.agreement = Agreement(directory, self.attempt, self.saver)
        self.clock = RankClock(directory.ranks, self.attempt.number)
        self.watchdog = Watchdog(directory, self.attempt, launch.hang_seconds)
        return record

    def log(self, step: int, **values: float) -> None:
        """Append a row of metrics."""
        if self.metrics:
            self.metrics.append(step, self.run.tokens_at(step), **values)

    def run_to_end(self, launch: Launch) -> None:
        """Train until the last step or until asked to stop."""
        total = self.run.total_steps
        if self.begin(launch) is None:
            # Step 0 has no update of its own: the attempt that begins there evaluates and saves it.
            self.evaluate_and_save(None)
        complete = "complete already" if self.step == total else "complete"
        # Before the first step, in which a rank without a batch would leave the others waiting.
        self.agreement.raise_failures(self.step, self.batches.failure(self.step + 1))
        with Progress(self.run.name, total, done=self.step) as progress:
            while self.step < total and not self.agreement.stopping:
                self.step += 1
                with self.profile.around(self.step):
                    result, speed = self.train_step()
                self.evaluate_and_save(result.loss)
                if self.step % RANKS_EVERY_STEPS == 0:
                    self.clock.report(self.step)
                progress.advance(
                    loss=result.loss, lr=learning_rate(self.run, self.step), tokens_per_s=speed
                )
        # The last save may still be in its thread: a run is not over before it is complete.
        self.saver.flush()
        self.clock.report(self.step)
        self.finish()
        if self.step == total and is_rank_zero():
            loss = "" if self.loss is None else f", held-out loss {self.loss:.4f} nats/token"
            print(f"{complete}: {self.run.name}, step {total:,}{loss}, in {self.directory.path}")

    def train_step(self) -> tuple[StepResult, float]:
        """Make one update, unless it is rejected, and log it; return also tokens per second."""
        step, run = self.step, self.run
        rate = learning_rate(run, step)
        observes = run.observe_every_steps is not None and step % run.observe_every_steps == 0
        figures: dict[str, float] = {}

        def flags() -> list[float]:
            self.watchdog.enter(step, LoopPhase.READ)
            # The next batch is tried now: a rank that cannot read it has to say so to the others.
            failure = self.batches.failure(step + 1)
            self.watchdog.enter(step, LoopPhase.AGREE)
            return self.agreement.flags(failure)

        # Each phase is announced to the watchdog, which names the one that hangs.
        self.clock.start()
        batch = self.batches(step)
        self.watchdog.enter(step, LoopPhase.COMPUTE)
        if step == run.perturbed_from:
            self.judge.forget()  # losses at changed weights are no spikes
        train_step = train_step_of(run, self.engine, step)
        if observes:
            result, figures = observed_step(
                self.engine, train_step, batch, rate, self.judge.accept, flags
            )
        else:
            result = train_step(batch, rate, self.judge.accept, flags)
        speed = speed_of(run, step, self.clock.stop())
        writing = self.agreement.reached(step, result.flags)
        self.watchdog.enter(step, LoopPhase.SAVE)

        # Stop, or note a skip, before the row is logged: a rejected update changed nothing.
        memory_bytes = self.agreement.memory_bytes
        row = {**result.figures, "learning_rate": rate, **speed, "memory_bytes": memory_bytes}
        if self.judge.objection:
            if not self.judge.skips:
                raise self.diverged(self.judge.objection, result.loss)
            row["skipped"] = 1

        # Further forward passes, with the weights after the update.
        if observes:
            figures |= forward_figures(self.engine, self.observed)
        figures |= self.quantization.figures(step)
        if not all(map(math.isfinite, figures.values())):
            raise self.diverged("not finite: weights, activations, logits or rounded losses")
        self.averages.update(step)
        self.log(step, **row, **figures)
        if not writing:  # on any rank
            self.saver.flush()
        return result, speed["tokens_per_second"]

    def diverged(self, figures: str, loss: float | None = None) -> DivergedError:
        """Return the error that ends a run, once its last good checkpoint is saved."""
        self.saver.flush()
        return DivergedError(self.directory, self.run.name, self.step, figures, loss)

    def evaluate(self, average: str | None = None) -> dict[str, float]:
        """Return the held-out losses of the model as it is, logged.

        Keys are held_out_loss, and held_out_loss.NAME of a further file; the log adds /AVERAGE.
        """
        losses = {
            use.replace("held_out", HELD_OUT_LOSS, 1): self.engine.evaluate(batch)
            for use, batch in self.held_out.items()
        }
        suffix = f"/{average}" if average else ""
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise self.diverged(f"not finite: held-out loss {loss} ({name}{suffix})")
        self.log(self.step, **{name + suffix: loss for name, loss in losses.items()})
        return losses

    def evaluate_and_save(self, train_loss: float | None) -> None:
        """Evaluate and save where that is due after this step, or where training stops."""
        step, run, directory = self.step, self.run, self.directory
        permanent, every = step in run.save_steps, run.saving.restart_every_steps
        # A restart checkpoint has what no permanent one of this step has; the end needs none.
        full = permanent and run.saving.keeps_state(step)
        due = self.agreement.stopping or (every is not None and step > 0 and step % every == 0)
        restart = due and not full and step < run.total_steps
        losses = self.evaluate() if permanent or step % run.evaluate_every_steps == 0 else {}
        self.loss = losses.get(HELD_OUT_LOSS, self.loss)
        if not permanent and not restart:
            return

        if self.metrics:
            self.metrics.sync()
        self.saver.flush()
        began_at = time.monotonic()

        # Averages first: the checkpoint that training resumes from is published last.
        checkpoints = []
        for average in self.averages.present(step) if permanent else ():
            with self.averages.swapped_in(average, step):
                of_average = self.evaluate(average.name)
                if run.saving.writes_averages(step):
                    description = self.averages.describe(average, step)
                    fields = self.fields(None, of_average) | {"average": description}
                    final = directory.average_checkpoint(average.name, step)
                    checkpoints.append(self.saver.copy(final, fields, weights_only=True))
        fields = self.fields(train_loss, losses)
        if permanent:
            final = directory.checkpoint(step)
            checkpoints.append(self.saver.copy(final, fields, weights_only=not full))
        if restart:
            final = directory.restart(step)
            checkpoints.append(self.saver.copy(final, fields, weights_only=False))
        self.saver.save(step, checkpoints, copying_seconds=time.monotonic() - began_at)

    def fields(self, train_loss: float | None, losses: dict[str, float]) -> dict[str, Any]:
        """Return the fields of a CheckpointRecord of this step."""
        return {
            "run": self.run.name,
            "fingerprint": fingerprint(self.run),
            "step": self.step,
            "tokens": self.run.tokens_at(self.step),
            "learning_rate": learning_rate(self.run, self.step),
            "train_loss": train_loss,
            "held_out_loss": losses.get(HELD_OUT_LOSS),
            "more_held_out_losses": {
                name.removeprefix(f"{HELD_OUT_LOSS}."): loss
                for name, loss in losses.items()
                if name != HELD_OUT_LOSS
            },
            "engine": self.run.engine,
            "precision": self.run.precision,
            "world_size": dist.get_world_size(),
            "layout": self.engine.layout,
            "attempt": self.attempt.number,
            "data_sha256": self.data.sha256,
            "model": self.run.model.model_dump(mode="json"),
            "average_starts": self.averages.starts,
            **self.judge.saved,
        }

    def finish(self) -> None:
        """Write status.json and destroy the process groups."""
        if self.metrics:
            self.metrics.close()
        if self.step == self.run.total_steps:
            self.saver.rotate(0)  # a run at its end needs no restart checkpoint
            self.attempt.end("done", self.step, "")
        else:
            reached = f"step {self.step} of {self.run.total_steps}"
            if is_rank_zero():
                print(f"stopped at {reached}; the same command resumes", flush=True)
            asked_by = self.agreement.stop_reason or stopping.OTHER_RANK
            self.attempt.end("preempted", self.step, f"stopped by {asked_by}", asked_by=asked_by)
        self.watchdog.close()
        self.engine.close()

    def fail(self, error: BaseException, reason: str) -> None:
        """Write status.json of an attempt that an error ends."""
        with contextlib.suppress(OSError):  # the error that ends training may be the disk's
            if dist.get_rank() == 0:
                remove_unfinished(self.directory)
            ending: Ending = "diverged" if isinstance(error, DivergedError) else "failed"
            self.attempt.end(ending, self.step, reason, loss=getattr(error, "loss", None))


def train(run_path: Path, run: RunConfig, launch: Launch) -> None:
    """Train a run to its end, or until it is asked to stop, from its newest checkpoint if any.

    status.json says how it ended. UserError for anything that keeps the run from continuing.
    """
    directory = RunDirectory(run_path)
    if is_rank_zero():
        # The end of an older attempt must not pass for the end of this one.
        directory.status_json.unlink(missing_ok=True)
    data = open_data(run, directory, verify_hashes=is_rank_zero())
    training = _Training(run, directory, data)
    try:
        training.run_to_end(launch)
    except SupersededError:
        # A newer attempt owns the directory: not even the end of this one is written there.
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        training.fail(error, reason)
        if launch.deterministic and "deterministic implementation" in reason:  # torch's words
            raise UserError(f"--deterministic: {reason}; train without it") from error
        raise
