"""Shards of a prepare: which there are, and how they become one corpus again; `python -m train merge`."""

import re
from collections.abc import Iterator
from pathlib import Path

from train.command import Progress, UserError
from train.corpus import Corpus, open_corpus
from train.corpus_writer import Piece, commit_corpus, join_pieces
from train.manifest import Manifest
from train.run_directory import scratch_directory


def shard_prefix(prefix: Path, shard: int, shards: int) -> Path:
    """The prefix of shard `shard` of `shards`, counted from 1."""
    return Path(f"{prefix}.shard-{shard}-of-{shards}")


def parse_shard(text: str) -> tuple[int, int]:
    """'2/4' as (2, 4); UserError for anything that is no such part."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {text} is no part I/N with I from 1 to N; write 1/4 for the first of four")
    return int(match[1]), int(match[2])


def _shards(prefix: Path) -> list[Path]:
    """The prefixes of all shards of a prefix, in order; UserError unless there are exactly the shards of one n."""
    pattern = re.compile(re.escape(prefix.name) + r"\.shard-(\d+)-of-(\d+)\.json")
    names = (path.name for path in prefix.parent.iterdir()) if prefix.parent.is_dir() else ()
    found = [(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match]
    if not found:
        raise UserError(f"{prefix} has no shards; make them with 'python -m train prepare --shard 1/N' and so on")
    shards = found[0][1]
    if any(other != shards for _, other in found):
        raise UserError(f"{prefix} has shards of {len({other for _, other in found})} divisions; delete the older ones")
    missing = sorted(set(range(1, shards + 1)) - {number for number, _ in found})
    if missing:
        raise UserError(f"{prefix} lacks shard {missing[0]} of {shards}; prepare it with --shard {missing[0]}/{shards}")
    return [shard_prefix(prefix, number, shards) for number in range(1, shards + 1)]


def merge(prefix: Path) -> Manifest:
    """Joins all shards of a prefix into PREFIX.bin/.idx and PREFIX.json, the bytes one prepare of all sources gives.

    The shards stay. UserError if one is missing or damaged, or they were made by different tokenizers.
    """
    shards: list[Corpus] = [open_corpus(shard) for shard in _shards(prefix)]
    first, manifests = shards[0], [shard.manifest for shard in shards]
    for shard in shards[1:]:
        if (shard.manifest.tokenizer_sha256, shard.manifest.eos_token_id) != (
            first.manifest.tokenizer_sha256,
            first.manifest.eos_token_id,
        ):
            raise UserError(f"{shard.prefix} and {first.prefix} were made by different tokenizers; prepare one again")
        if shard.manifest.share != first.manifest.share:
            raise UserError(f"{shard.prefix} and {first.prefix} hold different shares; prepare one again")
    sources = [item for manifest in manifests for item in manifest.sources.items()]
    if len(dict(sources)) < len(sources):
        raise UserError(f"the shards of {prefix} share a source; prepare them from one list of sources")
    with (
        scratch_directory(prefix.parent / f".{prefix.name}.partial") as aside,
        Progress("merge", len(shards)) as progress,
    ):

        def pieces() -> Iterator[Piece]:
            for shard in shards:
                yield Piece(Path(f"{shard.prefix}.bin"), shard.manifest.sha256, shard.lengths_D)
                progress.advance()

        files = join_pieces(pieces(), aside, first.tokens_T.dtype)
        manifest = first.manifest.model_copy(
            update={
                "max_token_id": max(part.max_token_id for part in manifests),
                "documents": sum(part.documents for part in manifests),
                "tokens": sum(part.tokens for part in manifests),
                "bin": files["bin"],
                "idx": files["idx"],
                "sources": dict(sources),
            }
        )
        commit_corpus(prefix, aside, manifest)
    return manifest
