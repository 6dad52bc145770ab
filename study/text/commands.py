"""The commands that make text and tokenizers for studies."""

from pathlib import Path
from typing import Annotated

import typer


def corpus(
    out: Annotated[Path, typer.Argument(help="directory that receives text and tokenizer")],
    vocab_size: Annotated[int, typer.Argument(min=257, help="tokens of the byte-level BPE")],
) -> None:
    """Make text and a tokenizer from the source of the running interpreter's standard library.

    Example: python -m study corpus runs/tiny/data/corpus 2048
    """
    from study.text.standard_library import build_corpus

    files = build_corpus(out, vocab_size)
    typer.echo(f"{out}: {files['train']} training files, {files['held_out']} held out")


def tokenizer_(
    sources: Annotated[
        list[Path], typer.Argument(help="files of text, as 'python -m train prepare' takes them")
    ],
    out: Annotated[Path, typer.Option(help="directory to write")],
    vocab_size: Annotated[int, typer.Option(min=257, help="tokens of the byte-level BPE")],
    share: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-STOP", help="of the documents, as 'python -m train prepare' takes it"
        ),
    ] = None,
) -> None:
    """Train a tokenizer on text, on its first GiB.

    Example: python -m study tokenizer books.jsonl --vocab-size 32768 --out tokenizers/books
    """
    from study.text.standard_library import build_tokenizer
    from train.data.share import EVERYTHING, parse_share

    build_tokenizer(
        sources, out, vocab_size=vocab_size, share=parse_share(share) if share else EVERYTHING
    )
    typer.echo(str(out))
