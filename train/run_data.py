"""The data of a run: token files opened and checked, and batches read ahead of the steps.

Shapes: B sequences, S tokens of a sequence.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray

from base.errors import UserError
from base.files import sha256_of
from train.data.batches import Batch, Replica, repetitive
from train.data.config import RepetitionFilter
from train.data.corpus import TokenSource, check_vocabulary, open_source
from train.data.manifest import Manifest, token_files
from train.data.order import Order
from train.data.tokenizer import TOKENIZER_JSON
from train.run.config import RunConfig
from train.run.directory import RunDirectory

STEPS_AHEAD = 2


class RunData:
    """The data of one run: see `open_data`.

    Attributes:
        sha256: identity of the tokens: "train", "held_out" and, if there are more, "held_out.NAME".
    """

    def __init__(
        self,
        run: RunConfig,
        train: TokenSource,
        held_out: dict[str, TokenSource],
        order_directory: Path,
    ) -> None:
        self._run, self._train, self._held_out = run, train, held_out
        size = train.num_sequences(run.data.sequence_length)
        self._order = Order(run.data.order, size, run.seed, run.batch_size, order_directory)
        sources = {"train": train} | held_out
        self.sha256 = {use: source.manifest.sha256 for use, source in sources.items()}

    def batch(self, step: int, replica: Replica | None = None) -> Batch:
        """Return a replica's rows of the batch of update `step`, from 1; without one, all rows.

        UserError for an unknown token.
        """
        size = self._run.batch_size_at(step)
        rows_B = replica.rows(size) if replica else np.arange(size)
        # Training batches divide evenly over the replicas, so that none of the rows is -1.
        indices_B = self._order(self._run.sequences_at(step - 1) + rows_B)
        return self._read(self._train, indices_B, self._run.data.repetition_filter)

    def held_out(self) -> dict[str, Batch]:
        """Return the first sequences of every held-out file, unfiltered, by the keys of `sha256`.

        "held_out" comes first.
        """
        indices_B = np.arange(self._run.data.held_out_sequences)
        return {use: self._read(source, indices_B, None) for use, source in self._held_out.items()}

    def _read(
        self, corpus: TokenSource, indices_B: NDArray[np.int64], rule: RepetitionFilter | None
    ) -> Batch:
        tokens_BS = corpus.sequences(indices_B, self._run.data.sequence_length)
        vocab_size = self._run.model.vocab_size
        # Files that were only listed were never read whole: a token is checked when it is used.
        if corpus.manifest.max_token_id is None and tokens_BS.max() >= vocab_size:
            raise UserError(
                f"a batch holds token {tokens_BS.max()}, outside the model's vocabulary of"
                f" {vocab_size}; correct the --dtype of 'train index', or raise model.vocab_size"
            )

        # Labels that enter the loss.
        counted_BS = np.ones((len(indices_B), self._run.data.sequence_length), bool)
        counted_BS[:, -1] = corpus.last_label_counts
        if rule:
            counted_BS[repetitive(tokens_BS[:, :-1], rule)] = False

        # A document begins after each end-of-text token, and at the start of the sequence.
        starts_BS = None
        if self._run.data.document_mask:
            starts_BS = torch.ones(counted_BS.shape, dtype=torch.bool)
            starts_BS[:, 1:] = torch.from_numpy(tokens_BS[:, :-2] == corpus.manifest.eos_token_id)
        return Batch(torch.from_numpy(tokens_BS), torch.from_numpy(counted_BS), starts_BS)


def open_data(run: RunConfig, directory: RunDirectory, *, verify_hashes: bool) -> RunData:
    """Open the data of a run, checked against the model and itself before anything is built.

    `verify_hashes` hashes files that are small enough for a start; one rank is enough.

    Raises:
        UserError: files missing, edited or too short, another tokenizer, tokens outside the
            vocabulary, or held-out sequences that are trained on.
    """
    train = open_source(directory.resolve(run.data.train), verify_hashes)
    files = {"held_out": run.data.held_out}
    files |= {f"held_out.{name}": file for name, file in run.data.more_held_out.items()}
    held_out = {
        use: open_source(directory.resolve(file), verify_hashes) for use, file in files.items()
    }
    for corpus in (train, *held_out.values()):
        check_vocabulary(corpus, run.model.vocab_size)
    _check_tokenizer(run, directory, (train, *held_out.values()))
    for source in held_out.values():
        _check_unseen(train, source)
        available = source.num_sequences(run.data.sequence_length)
        required = run.data.held_out_sequences
        if available < required:
            raise UserError(
                f"{source.prefix} holds {available} sequences, data.held_out_sequences asks for"
                f" {required}; prepare more held-out text or ask for fewer"
            )
    return RunData(run, train, held_out, directory.order)


def _check_tokenizer(
    run: RunConfig, directory: RunDirectory, corpora: tuple[TokenSource, ...]
) -> None:
    tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} does not exist; let data.tokenizer name the directory")
    tokenizer_sha256 = sha256_of(tokenizer)
    for corpus in corpora:
        if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(
                f"{corpus.prefix} was not made by {tokenizer}; prepare it again with that tokenizer"
            )


def _files(corpus: TokenSource) -> set[str]:
    """Return the real path and, where recorded, the hash of every token file of a corpus."""
    files = [
        (path, digest)
        for path, _, digest in token_files(corpus.prefix, corpus.manifest)
        if path.suffix != ".idx"  # documents of equal lengths have equal ones
    ]
    return {str(path.resolve()) for path, _ in files} | {digest for _, digest in files if digest}


def _check_unseen(corpus: TokenSource, held_out: TokenSource) -> None:
    """Raise UserError if a file, or a source, of the held-out text is trained on."""
    if shared := _files(corpus) & _files(held_out):
        raise UserError(
            f"{held_out.prefix} is trained on: {min(shared)} is a file of {corpus.prefix} too;"
            " hold out another file"
        )
    if not isinstance(corpus.manifest, Manifest) or not isinstance(held_out.manifest, Manifest):
        return
    shares = corpus.manifest.share, held_out.manifest.share
    # Shares choose documents by content: without a common place they have no text in common.
    if shares[0] and shares[1] and not shares[0].overlaps(shares[1]):
        return
    # Empty files all have one hash, which says nothing of their text.
    made_from = {record.digest for record in corpus.manifest.sources.values() if record.bytes}
    for name, record in held_out.manifest.sources.items():
        # A file on the hub has the hash of its tokens; other settings change that, not its name.
        if record.digest in made_from or (
            name.startswith("dataset:") and name in corpus.manifest.sources
        ):
            raise UserError(
                f"{held_out.prefix} is trained on: {corpus.prefix} was made from {name} too; "
                "prepare the held-out text from other sources"
            )


class Prefetch:
    """The batches of consecutive steps, read by a thread while the engine computes.

    A batch is a function of its step, so one that was read ahead and not used is not a loss.
    """

    def __init__(self, read: Callable[[int], Batch], last_step: int) -> None:
        self._read, self._last_step = read, last_step
        self._requests: SimpleQueue[tuple[int, Future[Batch]]] = SimpleQueue()
        self._reading: dict[int, Future[Batch]] = {}
        # A daemon: a file system that hangs must not keep a run that was stopped from ending.
        Thread(target=self._work, name="data", daemon=True).start()

    def _work(self) -> None:
        while True:
            step, future = self._requests.get()
            try:
                future.set_result(self._read(step))
            except Exception as error:  # noqa: BLE001  raised where the batch is asked for
                future.set_exception(error)

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step; raise what reading it raised."""
        self._request(step)
        return self._reading.pop(step).result()

    def failure(self, step: int) -> str | None:
        """Return why the batch of a step cannot be read, if so, once it has been tried.

        This rank alone knows: the others have other rows. None after the last step.
        """
        if step > self._last_step:
            return None
        self._request(step)
        error = self._reading[step].exception()
        if isinstance(error, OSError):
            return f"{error}; restore the file or free space, and run again"
        if error and not isinstance(error, UserError):
            raise error
        return str(error) if error else None

    def _request(self, step: int) -> None:
        for ahead in range(step, min(step + STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reading:
                self._reading[ahead] = Future()
                self._requests.put((ahead, self._reading[ahead]))
