"""python -m train: prepare token files, train runs."""

from pathlib import Path
from typing import Annotated

import typer

from train.command import UserError, is_rank_zero, run_command
from train.config import load_run, with_settings

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.command()
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="text files (one document each) or .jsonl with a 'text' a line")
    ],
    tokenizer: Annotated[Path, typer.Option(help="directory with tokenizer.json and tokenizer_config.json")],
    out: Annotated[Path, typer.Option(help="PREFIX of PREFIX.bin, PREFIX.idx and the manifest PREFIX.json")],
) -> None:
    """Tokenize text into Megatron's .bin/.idx with a manifest of hashes.

    Example: python -m train prepare books.jsonl --tokenizer tokenizer --out data/train
    """
    from train.prepare import prepare as prepare_tokens

    manifest = prepare_tokens(sources, tokenizer, out)
    typer.echo(f"{out}: {manifest.tokens} tokens in {manifest.documents} documents")


@app.command()
def run(
    run_dir: Annotated[Path, typer.Argument(help="directory with a run.json")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="key.path=value, for exploring: trains RUN_DIR-key=value beside RUN_DIR"),
    ] = None,
) -> None:
    """Train a run, or resume it from its newest complete checkpoint, to the end of its run.json.

    Example: torchrun --nproc-per-node 2 -m train run runs/tiny/lr3e-3
    """
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


if __name__ == "__main__":
    run_command(app, "train")
