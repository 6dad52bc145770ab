"""The one training loop. Everything that varies with time is a function of the step, so resuming is starting later."""

import contextlib
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from train import stopping
from train.attempt import Attempt, SupersededError
from train.averaging import Averages
from train.command import Progress, UserError, is_rank_zero
from train.config import RunConfig, dump_run
from train.data import RunData, SequenceBatch, open_data
from train.distributed import from_rank_zero, largest, start
from train.engine import Batch, Engine, StepResult, build_engine
from train.frozen import fingerprint
from train.monitoring import RANKS_EVERY_STEPS, Norms, RankClock, Speedometer, peak_memory_bytes
from train.resuming import Start, resume
from train.run_directory import PROBE_SEQUENCES, PROBE_TOKENS, RunDirectory, write_json
from train.saving import Saver, remove_leftovers
from train.schedules import learning_rate
from train.spikes import StepJudge
from train.tracking import MetricsWriter


class _Agreed(NamedTuple):
    """What all ranks know after a step."""

    stop: bool  # someone was asked to
    writing: bool  # someone still writes a checkpoint
    memory_bytes: float  # the largest peak


def _as_batch(found: SequenceBatch) -> Batch:
    documents_BS = None if found.documents_BS is None else torch.from_numpy(found.documents_BS)
    return Batch(torch.from_numpy(found.tokens_BS), torch.from_numpy(found.counted_BS), documents_BS)


class _Training:
    """One attempt of one run on this rank."""

    def __init__(self, run: RunConfig, directory: RunDirectory, data: RunData) -> None:
        self.run, self.directory, self.data = run, directory, data
        self.held_out = _as_batch(data.held_out())
        self.engine: Engine = build_engine(run, start())
        self.attempt = Attempt(directory, self.engine.layout)
        self.metrics: MetricsWriter | None = None
        self.step = 0
        self.reason = ""  # what asked this rank to stop

    def begin(self) -> Start:
        """Loads where training goes on from."""
        run, directory = self.run, self.directory
        if dist.get_rank() == 0:
            write_json(directory.run_json, dump_run(run))
            remove_leftovers(directory)
            self.metrics = MetricsWriter(directory.metrics, self.attempt.number)
        begun = resume(self.engine, run, directory, data_sha256=self.data.sha256, attempt=self.attempt.number)
        self.step, record = begun.step, begun.record
        self.attempt.amend(resumed_from_step=begun.step if record else None, quarantined=begun.quarantined)
        for step in begun.quarantined:
            self.log(step, quarantined=1)
        starts = {average.name: begun.step for average in run.averages} | (record.average_starts if record else {})
        self.averages = Averages(run, self.engine, {average.name: starts[average.name] for average in run.averages})
        self.judge = StepJudge(run, record.accepted if record else ())
        self.saver = Saver(run, self.engine, directory, self.attempt, self.log)
        if record and not begun.first:
            self.saver.follows(record)
        self.speedometer, self.clock = Speedometer(run), RankClock(directory.ranks, self.attempt.number)
        return begun

    def log(self, step: int, **values: float) -> None:
        """Appends a row of metrics; SupersededError where a later attempt has begun."""
        if self.metrics:
            self.attempt.check_newest()
            self.metrics.append(step, step * self.run.tokens_per_step, **values)

    def run_to_end(self) -> None:
        """Trains until the last step or until asked to stop."""
        total = self.run.total_steps
        begun = self.begin()
        if begun.record is None:
            self.evaluate_and_save(None, stop=False)
        stop = False
        with Progress(self.run.name, total, done=self.step) as progress:
            while self.step < total and not stop:
                self.step += 1
                result, speed, agreed = self.train_step()
                stop = agreed.stop
                self.saver.advance(self.step, writing=agreed.writing)
                self.evaluate_and_save(result.loss, stop=stop)
                if self.step % RANKS_EVERY_STEPS == 0:
                    self.clock.report(self.step)
                progress.advance(loss=result.loss, lr=learning_rate(self.run, self.step), tokens_per_s=speed)
        self.saver.flush(self.step)
        self.clock.report(self.step)
        self.finish()

    def train_step(self) -> tuple[StepResult, float, _Agreed]:
        """One update, judged and logged; its figures and tokens per second."""
        step, run = self.step, self.run
        rate = learning_rate(run, step)
        norms = Norms(self.engine.weights()) if run.norms_every_steps and step % run.norms_every_steps == 0 else None
        self.clock.start()
        batch = _as_batch(self.data.batch(step))
        result = self.engine.train_step(batch, rate, self.judge.accept)
        speed = self.speedometer.figures(self.clock.stop())
        agreed = self.agree()
        row: dict[str, float] = {
            **result._asdict(),
            "learning_rate": rate,
            **speed,
            "memory_bytes": agreed.memory_bytes,
        }
        if not batch.counted_BS.all():
            row["counted_fraction"] = batch.counted_BS.double().mean().item()
        if norms:
            row |= norms.figures(self.engine.weights())
        if self.judge.objection:
            self.rejected()
            row["skipped"] = 1
        self.averages.update(step)
        self.saver.learned |= not self.judge.objection and rate > 0
        self.log(step, **{name: value for name, value in row.items() if math.isfinite(value)})
        return result, speed["tokens_per_second"], agreed

    def agree(self) -> _Agreed:
        """What concerns one rank becomes known to all; SupersededError if a later attempt has begun."""
        rank_zero = dist.get_rank() == 0
        self.reason = stopping.requested(self.directory.stop_file if rank_zero else None) or self.reason
        successor = self.attempt.successor() if rank_zero else None
        flags = [bool(self.reason), self.saver.writing, successor is not None, peak_memory_bytes()]
        stop, writing, superseded, memory_bytes = largest([float(flag) for flag in flags])
        if superseded:
            raise SupersededError(from_rank_zero(successor))
        return _Agreed(stop > 0, writing > 0, memory_bytes)

    def rejected(self) -> None:
        """After a step that was not taken: UserError unless such steps are skipped."""
        if not self.judge.skips:
            raise self.not_learning(str(self.judge.objection))

    def not_learning(self, figures: str) -> UserError:
        """The error of a run that must not go on."""
        self.saver.flush(self.step)
        kept = sorted(self.directory.complete_steps() + self.directory.complete_restarts())
        return UserError(
            f"at step {self.step} of {self.run.name}: {figures}; the last good checkpoint is "
            f"{f'step {kept[-1]}' if kept else 'none'}, lower the peak learning rate"
        )

    def evaluate(self, average: str | None = None) -> float:
        """The held-out loss of what the model computes with, logged."""
        loss = self.engine.evaluate(self.held_out)
        if not math.isfinite(loss):
            raise self.not_learning(f"not finite: held-out loss {loss}{f' of {average}' if average else ''}")
        self.log(self.step, **{f"held_out_loss/{average}" if average else "held_out_loss": loss})
        return loss

    def evaluate_and_save(self, train_loss: float | None, *, stop: bool) -> None:
        """Does what is due after a step."""
        step, run = self.step, self.run
        permanent = step in run.save_steps
        every = run.saving.restart_every_steps
        restart = not permanent and (stop or (every is not None and step > 0 and step % every == 0))
        held_out_loss = None
        if permanent or step % run.evaluate_every_steps == 0:
            held_out_loss = self.evaluate()
        if not permanent and not restart:
            return
        if self.metrics:
            self.metrics.sync()
        self.saver.flush(step)
        began_at = time.monotonic()
        probe_BS = self.held_out.tokens_BS[:PROBE_SEQUENCES, : min(PROBE_TOKENS, run.data.sequence_length)]
        parts, directory = [], self.directory
        for average in self.averages.present(step) if permanent else ():
            with self.averages.swapped_in(average, step):
                loss = self.evaluate(average.name)
                fields = self.fields(None, loss) | {"average": self.averages.describe(average, step)}
                final = directory.average_checkpoint(average.name, step)
                parts.append(self.saver.copy(final, probe_BS=probe_BS, fields=fields))
        final = directory.checkpoint(step) if permanent else directory.restart(step)
        parts.append(self.saver.copy(final, probe_BS=probe_BS, fields=self.fields(train_loss, held_out_loss)))
        self.saver.save(step, parts, copying_seconds=time.monotonic() - began_at)

    def fields(self, train_loss: float | None, held_out_loss: float | None) -> dict[str, Any]:
        """The fields of a CheckpointRecord of this step."""
        return {
            "run": self.run.name,
            "fingerprint": fingerprint(self.run),
            "step": self.step,
            "tokens": self.step * self.run.tokens_per_step,
            "learning_rate": learning_rate(self.run, self.step),
            "train_loss": train_loss,
            "held_out_loss": held_out_loss,
            "engine": self.run.engine,
            "precision": self.run.precision,
            "world_size": dist.get_world_size(),
            "layout": self.engine.layout,
            "attempt": self.attempt.number,
            "data_sha256": self.data.sha256,
            "model": self.run.model.model_dump(mode="json"),
            "average_starts": self.averages.starts,
            "accepted": self.judge.accepted,
        }

    def finish(self) -> None:
        """Leaves the marker and the process groups."""
        done = self.step == self.run.total_steps
        failures = f"saves that had to be repeated: {'; '.join(self.saver.failures)}" if self.saver.failures else ""
        self.saver.close()
        if self.metrics:
            self.metrics.close()
            if not done:
                print(f"stopped at step {self.step} of {self.run.total_steps}; the same command goes on", flush=True)
        asked = "" if done else f"asked to stop by {self.reason or 'another rank'}"
        self.attempt.end("done" if done else "preempted", self.step, "; ".join(filter(None, (asked, failures))))
        self.engine.close()

    def fail(self, reason: str) -> None:
        """Leaves the marker of an attempt that an error ends."""
        with contextlib.suppress(OSError):  # the error that ends training may be the disk's
            if dist.get_rank() == 0:
                remove_leftovers(self.directory)
            self.attempt.end("failed", self.step, reason)


def train(run_path: Path, run: RunConfig) -> None:
    """Trains a run to its end, or until it is asked to stop, from the newest whole checkpoint if there is one.

    How it ended is in status.json. A file RUN/STOP asks it to stop, and a signal if `stopping.listen` was called.

    Raises:
        UserError: for anything that keeps the run from going on.
    """
    directory = RunDirectory(run_path)
    if is_rank_zero():
        directory.status_json.unlink(missing_ok=True)
    data = open_data(run, directory, verify_hashes=is_rank_zero())
    training = _Training(run, directory, data)
    try:
        training.run_to_end()
    except SupersededError:
        raise
    except BaseException as error:
        training.fail(" ".join(str(error).split()) or type(error).__name__)
        raise
