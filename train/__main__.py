"""python -m train: prepare token files, train runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from train.command import UserError, is_rank_zero, run_command
from train.config import load_run, with_settings

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def prepare(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="files, also .gz or .zst: text (one document each), .jsonl, .parquet; PREFIXes of token files"
        ),
    ] = None,
    *,
    tokenizer: Annotated[Path, typer.Option(help="directory with tokenizer.json and tokenizer_config.json")],
    out: Annotated[Path, typer.Option(help="PREFIX of PREFIX.bin, PREFIX.idx and the manifest PREFIX.json")],
    key: Annotated[str, typer.Option(help="key of a line, or column of a table, that holds the text")] = "text",
    dataset: Annotated[
        str | None, typer.Option(help="instead of files: a dataset on the hub, or a directory, read as a stream")
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="configuration of the dataset")] = None,
    split: Annotated[str, typer.Option(help="split of the dataset")] = "train",
    files: Annotated[
        str | None, typer.Option(metavar="N|N-M", help="only these of the dataset's files, counted from 1")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes; each source is read by one of them")] = 1,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="only the I-th of N parts of the sources, for 'merge'")
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-STOP",
            help="only documents whose hash falls there, of 1000000 places: 0-20000 and 20000-1000000 share none",
        ),
    ] = None,
    document_tokens: Annotated[
        int | None, typer.Option(min=2, help="of each document only so many tokens, end of text included")
    ] = None,
    at_least: Annotated[int, typer.Option(min=0, help="refuse if fewer tokens come out")] = 0,
) -> None:
    """Tokenize text into Megatron's .bin/.idx with a manifest of hashes. A prepare that was killed goes on.

    Examples: python -m train prepare books.jsonl --tokenizer tokenizer --out data/train
    python -m train prepare --dataset HuggingFaceFW/fineweb-edu --dataset-config sample-10BT --tokenizer tokenizer
    --out data/train --workers 8 --shard 1/4
    python -m train prepare --dataset allenai/c4 --dataset-config en --files 2 --tokenizer tokenizer --out data/c4
    """
    from train.documents import dataset_parts
    from train.part import Chosen
    from train.prepare import prepare as prepare_tokens
    from train.shards import parse_shard
    from train.share import EVERYTHING, parse_share

    if bool(sources) == bool(dataset):
        raise UserError("give either files or --dataset; see python -m train prepare --help")
    if not dataset and (dataset_config or split != "train" or files is not None):
        raise UserError("--dataset-config, --split and --files belong to --dataset; leave them out")
    found = dataset_parts(dataset, dataset_config, split, key, files) if dataset else sources or []
    part = parse_shard(shard) if shard else None
    chosen = Chosen(parse_share(share) if share else EVERYTHING, document_tokens)
    manifest = prepare_tokens(
        found, tokenizer, out, key=key, workers=workers, shard=part, chosen=chosen, at_least=at_least
    )
    typer.echo(f"{out}: {manifest.tokens} tokens in {manifest.documents} documents")


@app.command()
def merge(prefixes: Annotated[list[Path], typer.Argument(help="PREFIX of PREFIX.shard-I-of-N.bin and so on")]) -> None:
    """Join the shards of a prefix into what one prepare of all sources would have written; the shards stay.

    Example: python -m train merge data/train
    """
    from train.shards import merge as merge_shards

    for prefix in prefixes:
        manifest = merge_shards(prefix)
        typer.echo(f"{prefix}: {manifest.tokens} tokens in {manifest.documents} documents")


@app.command()
def index(
    files: Annotated[list[Path], typer.Argument(help="OLMo's raw .npy token files, in the order of training")],
    out: Annotated[Path, typer.Option(help="PREFIX of the manifest PREFIX.json; the files stay where they are")],
    dtype: Annotated[Literal["uint16", "uint32"], typer.Option(help="of a token")],
    tokenizer: Annotated[Path, typer.Option(help="directory with tokenizer.json and tokenizer_config.json")],
    eos: Annotated[int | None, typer.Option(min=0, help="token that ends a document; default: the tokenizer's")] = None,
    hash_: Annotated[bool, typer.Option("--hash", help="read every file to record its SHA-256")] = False,
    scan: Annotated[bool, typer.Option(help="read every file to record the largest token")] = False,
) -> None:
    """List OLMo's token files in a manifest, to be trained on in place.

    Example: python -m train index mix/part-*.npy --out data/mix --dtype uint32 --tokenizer tokenizer --eos 100257
    """
    from train.manifest import index as index_files
    from train.run_directory import sha256_of
    from train.tokenizer import TOKENIZER_JSON, load_tokenizer

    loaded, eos_token_id = load_tokenizer(tokenizer)
    manifest = index_files(
        files,
        out,
        dtype=dtype,
        vocab_size=loaded.get_vocab_size(),
        eos_token_id=eos_token_id if eos is None else eos,
        tokenizer_sha256=sha256_of(tokenizer / TOKENIZER_JSON),
        hashes=hash_,
        scan=scan,
    )
    typer.echo(f"{out}: {manifest.tokens} tokens in {len(files)} files")


@app.command()
def verify(prefixes: Annotated[list[Path], typer.Argument(help="PREFIX of a token file or of an index")]) -> None:
    """Hash every file of a corpus, however large, and compare with its manifest.

    Example: python -m train verify data/train data/held_out
    """
    from train.manifest import verify as verify_corpus

    for prefix in prefixes:
        typer.echo(f"{prefix}: {verify_corpus(prefix)} bytes are as recorded")


@app.command()
def run(
    run_dir: Annotated[Path, typer.Argument(help="directory with a run.json")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key.path=value, for exploring: trains RUN_DIR-key=value beside RUN_DIR"),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs where torch sees one, else the CPU")
    ] = "auto",
) -> None:
    """Train a run, or resume it from its newest whole checkpoint, to the end of its run.json.

    SIGUSR1, SIGTERM or a file RUN_DIR/STOP ends it after its next step with a checkpoint; RUN_DIR/status.json says so.

    Example: torchrun --nproc-per-node 2 -m train run runs/tiny/lr3e-3
    """
    from train import stopping
    from train.gpus import choose

    stopping.listen()
    choose(device)
    from train.loop import train

    config = load_run(run_dir / "run.json")
    if not set_:
        train(run_dir, config)
        return
    run_dir = run_dir.resolve()
    changed = with_settings(config, set_)
    changed_dir = run_dir.parent / (run_dir.name + changed.name.removeprefix(config.name))
    if (changed_dir / "run.json").exists() and load_run(changed_dir / "run.json") != changed:
        raise UserError(f"{changed_dir} holds another configuration; remove it or change the setting")
    if is_rank_zero():
        typer.echo(f"training {changed_dir}")
    train(changed_dir, changed)


@app.command()
def branch(
    parent: Annotated[Path, typer.Argument(help="directory of a run")],
    *,
    step: Annotated[int, typer.Option(min=1, help="with a permanent checkpoint of the parent")],
    out: Annotated[Path, typer.Option(help="directory of the new run; its name is the run's")],
    cooldown_steps: Annotated[int, typer.Option(min=1, help="updates until the learning rate is zero")],
    shape: Annotated[Literal["linear", "cosine", "sqrt"], typer.Option(help="of the way down")] = "linear",
) -> None:
    """Write run.json of a cooldown from a checkpoint of a run, on the data the run itself went on with.

    Example: python -m train branch runs/stable --step 8000 --out runs/cooldown-8000 --cooldown-steps 1000
    """
    from train.branching import branch as make_branch

    run = make_branch(parent, out, step=step, cooldown_steps=cooldown_steps, shape=shape)
    typer.echo(f"{out}: steps {step + 1} to {run.total_steps}; train it with python -m train run {out}")


@app.command()
def schedule(
    run_dirs: Annotated[list[Path], typer.Argument(help="directories with a run.json")],
    out: Annotated[Path | None, typer.Option(help="PNG to draw them all into")] = None,
) -> None:
    """Show the learning rates of runs: a table of each and, with --out, one picture of all.

    Example: python -m train schedule runs/tiny/lr1e-3 runs/tiny/lr3e-3 --out schedules.png
    """
    from rich.console import Console

    from train.schedule_plot import draw_schedules, schedule_table

    configs = [load_run(run_dir / "run.json") for run_dir in run_dirs]
    for config in configs:
        Console(markup=False, highlight=False).print(schedule_table(config))
    if out:
        draw_schedules(configs, out)
        typer.echo(f"drawn into {out}")


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="a run directory")],
    run_b: Annotated[Path, typer.Argument(help="the other one; a branch and its parent share steps, too")],
    tolerance: Annotated[
        float | None,
        typer.Option(help="exit code 1 if a loss (nats per token) or another figure (relative) exceeds it"),
    ] = None,
) -> None:
    """Show which settings of two runs differ, and from which step on and how far their figures do.

    Example: python -m train compare runs/tiny/lr3e-3 runs/tiny/lr3e-3-engine=deepspeed --tolerance 1e-4
    """
    from train.compare import compare_runs, describe

    comparison = compare_runs(run_a, run_b, tolerance)
    typer.echo(describe(comparison))
    if tolerance is not None and comparison.exceeds(tolerance):
        raise typer.Exit(1)


@app.command()
def plan(
    run_dirs: Annotated[list[Path], typer.Argument(help="directories with a run.json")],
    nodes: Annotated[int, typer.Option(help="machines")],
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each")],
    gpu: Annotated[str, typer.Option(help="h100, h200 or a100")],
    mfu: Annotated[float | None, typer.Option(help="speed as a share of the GPU's peak in bf16")] = None,
    tokens_per_second_per_gpu: Annotated[float | None, typer.Option(help="speed as tokens")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="file to write the same figures to")] = None,
) -> None:
    """Show what runs need before they start: GPU memory, layouts that fit, GPU-hours, days and disk.

    Example: python -m train plan runs/olmo2-7b/lr* --nodes 8 --gpus-per-node 8 --gpu h100 --mfu 0.47
    """
    from train.plan import make_cluster, plan_run
    from train.plan_report import print_plans, write_plans

    cluster = make_cluster(nodes, gpus_per_node, gpu, mfu, tokens_per_second_per_gpu)
    plans = [plan_run(load_run(run_dir / "run.json"), cluster) for run_dir in run_dirs]
    print_plans(plans, cluster)
    if json_:
        write_plans(plans, cluster, json_)


if __name__ == "__main__":
    run_command(app, "train")
