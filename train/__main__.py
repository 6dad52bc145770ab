"""python -m train: prepare token files, plan runs, train them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from base.cli import command_group, options_of, run_command
from base.environment import is_rank_zero
from base.errors import UserError
from train.run.config import RunConfig, load_run, with_settings
from train.run.directory import RunDirectory
from train.run.launch import Launch, set_variables

# Commands and options, and what other programs call them.
SYNONYMS = {
    "run": "train start launch execute resume continue pretrain",
    "prepare": "tokenize preprocess prepare-data",
    "verify": "check validate",
    "plan": "estimate memory layout",
    "--set": "lr steps seed",
}
app = command_group(__doc__)

Tokenizer = Annotated[
    Path, typer.Option(help="directory with tokenizer.json and tokenizer_config.json")
]


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="files, also .gz or .zst: text (one document each), .jsonl, .ndjson, .json,"
            " .parquet; PREFIXes of token files; dataset:NAME[:CONFIG[:SPLIT[:FILES]]] of the hub"
            " or a directory, where FILES is a number or range such as 1-8"
        ),
    ],
    *,
    tokenizer: Tokenizer,
    out: Annotated[
        Path, typer.Option(help="PREFIX of PREFIX.bin, PREFIX.idx and the manifest PREFIX.json")
    ],
    key: Annotated[
        str, typer.Option(help="key of a line, or column of a table, that holds the text")
    ] = "text",
    workers: Annotated[
        int, typer.Option(min=1, help="processes; each source is read by one of them")
    ] = 1,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-STOP",
            help="only documents whose hash is in this range of 1000000 places: 0-20000 and"
            " 20000-1000000 have none in common",
        ),
    ] = None,
    document_tokens: Annotated[
        int | None, typer.Option(min=2, help="tokens kept of each document, end of text included")
    ] = None,
    at_least: Annotated[int, typer.Option(min=0, help="refuse a result of fewer tokens")] = 0,
    parse_special_tokens: Annotated[
        bool,
        typer.Option(
            "--parse-special-tokens",
            help="read special tokens that are typed in a text, such as <|endoftext|>, as such;"
            " default: as ordinary text",
        ),
    ] = False,
) -> None:
    """Tokenize text into Megatron's .bin/.idx and a manifest of hashes; resume if killed.

    Example: python -m train prepare books.jsonl --tokenizer tokenizer --out data/train

    Example: python -m train prepare dataset:HuggingFaceFW/fineweb-edu:sample-10BT
    --tokenizer tokenizer --out data/train --workers 8
    """
    from train.data.documents import parse_source
    from train.data.manifest import EVERYTHING, parse_share
    from train.data.prepare import Selection
    from train.data.prepare import prepare as prepare_tokens

    selection = Selection(
        share=parse_share(share) if share else EVERYTHING,
        document_tokens=document_tokens,
        special_tokens="parse" if parse_special_tokens else "split",
    )
    manifest = prepare_tokens(
        [source for text in sources for source in parse_source(text, key)],
        tokenizer,
        out,
        workers=workers,
        selection=selection,
        at_least=at_least,
    )
    typer.echo(f"{out}: {manifest.tokens:,} tokens in {manifest.documents:,} documents")
    if count := manifest.typed_special_tokens:
        read = "read as such" if parse_special_tokens else "split as ordinary text"
        typer.echo(f"special tokens typed in the text: {count:,}, {read}")


@app.command()
def index(
    files: Annotated[
        list[Path], typer.Argument(help="OLMo's raw .npy token files, in the order of training")
    ],
    *,
    out: Annotated[
        Path, typer.Option(help="PREFIX of the manifest PREFIX.json; the files stay where they are")
    ],
    dtype: Annotated[Literal["uint16", "uint32"], typer.Option(help="of a token")],
    tokenizer: Tokenizer,
    eos: Annotated[
        int | None, typer.Option(min=0, help="token that ends a document; default: the tokenizer's")
    ] = None,
) -> None:
    """List OLMo's token files in a manifest, to be trained on in place.

    Example: python -m train index mix/part-*.npy --out data/mix --dtype uint32
    --tokenizer tokenizer --eos 100257
    """
    from base.files import sha256_of
    from train.data.indexing import index as index_files
    from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer, vocabulary_size

    loaded, eos_token_id = load_tokenizer(tokenizer)
    manifest = index_files(
        files,
        out,
        dtype=dtype,
        vocab_size=vocabulary_size(loaded),
        eos_token_id=eos_token_id if eos is None else eos,
        tokenizer_sha256=sha256_of(tokenizer / TOKENIZER_JSON),
    )
    typer.echo(f"{out}: {manifest.tokens:,} tokens in {len(files)} files")


@app.command()
def verify(prefixes: Annotated[list[Path], typer.Argument(help="PREFIX of a token file")]) -> None:
    """Hash the files of prepared text, however large, and compare with its manifest.

    Example: python -m train verify data/train data/held_out
    """
    from train.data.manifest import verify as verify_corpus

    for prefix in prefixes:
        typer.echo(f"{prefix}: {verify_corpus(prefix):,} bytes are as recorded")


@app.command()
@options_of(Launch)
def run(
    run_dir: Annotated[Path, typer.Argument(help="directory with a run.json")],
    settings: Launch,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="PATH=VALUE, for exploring: trains RUN_DIR-KEY=VALUE beside RUN_DIR"
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="auto: GPUs where torch sees one, else the CPU"),
    ] = "auto",
) -> None:
    """Train a run to the end of its run.json; resume it from its newest undamaged checkpoint.

    SIGUSR1, SIGTERM or a file RUN_DIR/STOP ends it after its next step with a checkpoint;
    RUN_DIR/status.json says how it ended. Ranks that hang are ended, and named; the same command
    resumes.

    Example: torchrun --nproc-per-node 2 -m train run runs/tiny/lr3e-3
    """
    from base import stopping
    from base.gpus import choose

    stopping.listen()
    config = load_run(run_dir / "run.json")  # before torch is imported: errors come at once
    if set_:
        run_dir, config = _changed(run_dir.resolve(), set_)
    choose(device)
    set_variables(config, RunDirectory(run_dir), settings)
    import torch

    from train.loop import train

    if settings.deterministic:  # the call imports torch's compiler, a second of a start
        torch.use_deterministic_algorithms(True)
    if set_ and is_rank_zero():
        typer.echo(f"training {run_dir}")
    train(run_dir, config, settings)


def _changed(run_dir: Path, settings: list[str]) -> tuple[Path, RunConfig]:
    """Return the directory and configuration of the run that `--set` makes of another one."""
    config = load_run(run_dir / "run.json")
    changed = with_settings(config, settings)
    # The directory gets what the settings added to the name of the run.
    changed_dir = run_dir.parent / (run_dir.name + changed.name.removeprefix(config.name))
    if (changed_dir / "run.json").exists() and load_run(changed_dir / "run.json") != changed:
        raise UserError(
            f"{changed_dir} holds another configuration; change the setting, or the name of the run"
        )
    return changed_dir, changed


@app.command()
def plan(
    run_dirs: Annotated[list[Path], typer.Argument(help="directories with a run.json")],
    *,
    nodes: Annotated[int, typer.Option(min=1, help="machines")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each")],
    gpu: Annotated[Literal["h100", "h200", "a100"], typer.Option(help="kind of GPU")],
    whole: Annotated[
        bool, typer.Option("--all", help="the parts of each estimate, and all layouts that fit")
    ] = False,
) -> None:
    """Show what runs need before they start: if they fit, GPU-hours, memory and disk.

    Example: python -m train plan runs/olmo2-7b/lr* --nodes 8 --gpus-per-node 8 --gpu h100
    """
    from train.planning.report import PlannedGpus, plan_lines

    runs = [load_run(run_dir / "run.json") for run_dir in run_dirs]
    lines = plan_lines(runs, PlannedGpus(nodes, gpus_per_node, gpu), whole=whole)
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    run_command(app, "train", SYNONYMS)
