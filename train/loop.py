"""The one training loop. Everything that varies with time is a function of the step, so resuming is starting later."""

import fcntl
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from train.checkpoint import PROBE_SEQUENCES, commit_checkpoint, from_rank_zero, remove_leftovers, resume
from train.command import Progress, UserError
from train.config import RunConfig, dump_run, fingerprint, load_run
from train.data import Corpus, batch, check_vocabulary, open_corpus
from train.engine import Engine, StepResult, build_engine
from train.run_directory import RunDirectory, write_json
from train.schedules import learning_rate
from train.tracking import MetricsWriter, record_attempt


def _open_data(run: RunConfig, directory: RunDirectory) -> tuple[Corpus, Corpus]:
    """Training and held-out tokens, checked against the model before anything is built."""
    corpora = []
    for prefix in (run.data.train, run.data.held_out):
        corpus = open_corpus(directory.path / prefix, verify_hashes=True)
        check_vocabulary(corpus, run.model.vocab_size)
        corpora.append(corpus)
    train_corpus, held_out = corpora
    train_corpus.num_sequences(run.data.sequence_length)
    available = held_out.num_sequences(run.data.sequence_length)
    if available < run.data.held_out_sequences:
        raise UserError(
            f"{held_out.prefix} holds {available} sequences, data.held_out_sequences asks for "
            f"{run.data.held_out_sequences}; prepare more held-out text or ask for fewer"
        )
    if train_corpus.manifest.tokenizer_sha256 != held_out.manifest.tokenizer_sha256:
        raise UserError(f"{train_corpus.prefix} and {held_out.prefix} were made by different tokenizers; prepare again")
    return train_corpus, held_out


class _Training:
    """One attempt of one run on this rank."""

    def __init__(self, run: RunConfig, directory: RunDirectory, train_corpus: Corpus, held_out: Corpus) -> None:
        self.run, self.directory, self.train_corpus = run, directory, train_corpus
        held_out_NS = held_out.sequences(np.arange(run.data.held_out_sequences), run.data.sequence_length)
        self.held_out_NS = torch.from_numpy(held_out_NS)
        self.engine: Engine = build_engine(run)
        self.rank_zero = dist.get_rank() == 0
        self.lock = self._lock()
        self.first_step = resume(self.engine, directory, fingerprint(run), train_corpus.manifest.bin.sha256)
        self.attempt: int = from_rank_zero(self._start() if self.rank_zero else None)
        self.metrics = MetricsWriter(directory.metrics, self.attempt) if self.rank_zero else None

    def _lock(self) -> object:
        """Rank 0 holds a lock on the run: two attempts at once, one of them orphaned, must not both write."""
        lock, taken = None, True
        if self.rank_zero:
            lock = (self.directory.path / ".lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = False
        if not from_rank_zero(taken):
            raise UserError(f"another process is training {self.directory.path}; wait until it ends or end it")
        return lock

    def _start(self) -> int:
        write_json(self.directory.run_json, dump_run(self.run))
        remove_leftovers(self.directory)
        return record_attempt(
            self.directory.environment_json, resumed_from_step=self.first_step, layout=self.engine.layout
        )

    def log(self, step: int, **values: float) -> None:
        if self.metrics:
            self.metrics.append(step, step * self.run.tokens_per_step, **values)

    def step(self, step: int) -> StepResult:
        run = self.run
        sequences = batch(
            self.train_corpus,
            step=step,
            batch_size=run.batch_size,
            sequence_length=run.data.sequence_length,
            seed=run.seed,
        )
        if sequences.max() >= run.model.vocab_size:
            raise UserError(
                f"{self.train_corpus.prefix}: token outside the vocabulary at step {step}; prepare it again"
            )
        rate = learning_rate(run, step)
        result = self.engine.train_step(torch.from_numpy(sequences), rate)
        if not result.is_finite():
            raise self._not_finite(step, f"loss {result.loss}, gradient norm {result.grad_norm}")
        self.log(step, **result._asdict(), learning_rate=rate)
        return result

    def _not_finite(self, step: int, figures: str) -> UserError:
        kept = self.directory.complete_steps()
        return UserError(
            f"not finite at step {step} of {self.run.name}: {figures}; the last good checkpoint is "
            f"{f'step {kept[-1]}' if kept else 'none'}, lower the peak learning rate"
        )

    def evaluate_and_save(self, step: int, train_loss: float | None) -> None:
        save = step in self.run.save_steps
        if not save and step % self.run.evaluate_every_steps:
            return
        held_out_loss = self.engine.evaluate(self.held_out_NS)
        if not math.isfinite(held_out_loss):
            raise self._not_finite(step, f"held-out loss {held_out_loss}")
        self.log(step, held_out_loss=held_out_loss)
        if save:
            fields = {
                "run": self.run.name,
                "fingerprint": fingerprint(self.run),
                "step": step,
                "tokens": step * self.run.tokens_per_step,
                "learning_rate": learning_rate(self.run, step),
                "train_loss": train_loss,
                "held_out_loss": held_out_loss,
                "engine": self.run.engine,
                "precision": self.run.precision,
                "world_size": dist.get_world_size(),
                "layout": self.engine.layout,
                "attempt": self.attempt,
                "data_sha256": self.train_corpus.manifest.bin.sha256,
                "model": self.run.model.model_dump(mode="json"),
            }
            commit_checkpoint(self.engine, self.directory, self.held_out_NS[:PROBE_SEQUENCES, :-1], fields)

    def run_to_end(self) -> None:
        step, total = self.first_step, self.run.total_steps
        if step == 0:
            self.evaluate_and_save(0, None)
        with Progress(self.run.name, total, done=step) as progress:
            while step < total:
                step += 1
                result = self.step(step)
                self.evaluate_and_save(step, result.loss)
                progress.advance(loss=result.loss, lr=learning_rate(self.run, step))
        if self.metrics:
            self.metrics.close()
        self.engine.close()


def train(run_path: Path, run: RunConfig | None = None) -> None:
    """Trains the run of a run directory to its end, from its newest complete checkpoint if there is one.

    Args:
        run_path: the run directory; its run.json is read unless `run` is given.
        run: the configuration, for a directory that does not exist yet.
    """
    directory = RunDirectory(run_path)
    run = run or load_run(directory.run_json)
    torch.manual_seed(run.seed)
    train_corpus, held_out = _open_data(run, directory)
    _Training(run, directory, train_corpus, held_out).run_to_end()
