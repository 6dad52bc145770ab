"""A byte-level BPE trained on the text of a study."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from base.errors import UserError
from base.files import committed_directory, naming, write_json
from base.progress import Progress
from ckpt_tools.released.download import check_replaceable
from train.data.documents import TextFile, check_given_once
from train.data.manifest import Share

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_BYTES = 1 << 30  # of text that a tokenizer is trained on


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE whose token 0 ends a text; it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes are tokens, also those that the training text lacks: any text is encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    # The trainer stops early where no pair of tokens is left to merge.
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}; give more text"
            " or lower the vocabulary (of a study: give a --tokenizer, or --set model.vocab_size)"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write a tokenizer as transformers reads it."""
    directory.mkdir(exist_ok=True)
    path = directory / "tokenizer.json"
    with naming(path):  # the library's own errors have neither name nor number
        path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", config)


def build_tokenizer(
    sources: Sequence[TextFile], out: Path, *, vocab_size: int, share: Share
) -> None:
    """Write a tokenizer that is trained on the first GiB of a share of the documents."""
    check_replaceable(out)
    check_given_once(sources)
    tokenizer = train_tokenizer(_first_documents(sources, share), vocab_size)
    with committed_directory(out) as aside:
        save_tokenizer(tokenizer, aside)


def _first_documents(sources: Sequence[TextFile], share: Share) -> Iterator[str]:
    read = 0
    with Progress("tokenizer", total=len(sources)) as progress:
        for source in sources:
            for text in source.texts():
                content = text.encode()
                if share.holds(content):
                    yield text
                    read += len(content)
                if read >= TOKENIZER_BYTES:
                    return
            progress.advance()
