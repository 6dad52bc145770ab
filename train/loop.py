"""The one training loop. Everything that varies with time is a function of the step, so resuming is starting later."""

import fcntl
import math
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from train.checkpoint import PROBE_SEQUENCES, PROBE_TOKENS, commit_checkpoint, remove_leftovers, resume
from train.command import Progress, UserError, is_rank_zero
from train.config import RunConfig, dump_run
from train.data import Corpus, batch, check_vocabulary, open_corpus
from train.distributed import from_rank_zero, start
from train.engine import Batch, Engine, StepResult, build_engine
from train.frozen import fingerprint
from train.prepare import TOKENIZER_JSON
from train.run_directory import RunDirectory, sha256_of, write_json
from train.schedules import learning_rate
from train.tracking import MetricsWriter, record_attempt


def _open_data(run: RunConfig, directory: RunDirectory) -> tuple[Corpus, Corpus]:
    """Training and held-out tokens, checked against the model before anything is built. Rank 0 checks the hashes."""
    corpora = []
    for prefix in (run.data.train_sources[0].source, run.data.held_out):
        corpus = open_corpus(directory.resolve(prefix), verify_hashes=is_rank_zero())
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
    tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} does not exist; let data.tokenizer name the directory that made the tokens")
    tokenizer_sha256 = sha256_of(tokenizer)
    for corpus in corpora:
        if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(f"{corpus.prefix} was not made by {tokenizer}; prepare it again with that tokenizer")
    return train_corpus, held_out


class _Training:
    """One attempt of one run on this rank."""

    def __init__(self, run: RunConfig, directory: RunDirectory, train_corpus: Corpus, held_out: Corpus) -> None:
        self.run, self.directory, self.train_corpus = run, directory, train_corpus
        held_out_NS = held_out.sequences(np.arange(run.data.held_out_sequences), run.data.sequence_length)
        self.held_out_NS = torch.from_numpy(held_out_NS)
        self.engine: Engine = build_engine(run, start())
        self.rank_zero = dist.get_rank() == 0
        self.lock = self._lock()
        self.data_sha256 = {"train": train_corpus.manifest.bin.sha256, "held_out": held_out.manifest.bin.sha256}
        self.resumed = resume(self.engine, directory, fingerprint(run), self.data_sha256)
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self.attempt: int = from_rank_zero(self._start(sorted(set(hosts))) if self.rank_zero else None)
        self.metrics = MetricsWriter(directory.metrics, self.attempt) if self.rank_zero else None

    def _lock(self) -> object:
        """Rank 0 holds a lock on the run: two attempts at once, one of them orphaned, must not both write."""
        lock, taken = None, True
        if self.rank_zero:
            self.directory.path.mkdir(exist_ok=True)
            lock = (self.directory.path / ".lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                taken = False
        if not from_rank_zero(taken):
            raise UserError(f"another process is training {self.directory.path}; wait until it ends or end it")
        return lock

    def _start(self, hosts: list[str]) -> int:
        write_json(self.directory.run_json, dump_run(self.run))
        remove_leftovers(self.directory)
        return record_attempt(
            self.directory.environment_json, hosts=hosts, resumed_from_step=self.resumed, layout=self.engine.layout
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
        rate = learning_rate(run, step)
        started_at = time.perf_counter()
        result = self.engine.train_step(Batch.of(torch.from_numpy(sequences)), rate, StepResult.is_finite)
        seconds = time.perf_counter() - started_at
        if not result.is_finite():
            raise self._not_finite(step, f"loss {result.loss}, gradient norm {result.grad_norm}")
        speed = run.tokens_per_step / seconds
        self.log(step, **result._asdict(), learning_rate=rate, tokens_per_second=speed)
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
        held_out_loss = self.engine.evaluate(Batch.of(self.held_out_NS))
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
                "data_sha256": self.data_sha256,
                "model": self.run.model.model_dump(mode="json"),
            }
            if self.metrics:
                self.metrics.sync()
            probe_BS = self.held_out_NS[:PROBE_SEQUENCES, : min(PROBE_TOKENS, self.run.data.sequence_length)]
            commit_checkpoint(self.engine, self.directory, probe_BS, fields)

    def run_to_end(self) -> None:
        step, total = self.resumed or 0, self.run.total_steps
        if self.resumed is None:
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


def train(run_path: Path, run: RunConfig) -> None:
    """Trains a run to its end, from the newest complete checkpoint of its directory if there is one."""
    directory = RunDirectory(run_path)
    train_corpus, held_out = _open_data(run, directory)
    _Training(run, directory, train_corpus, held_out).run_to_end()
