"""`python -m quant_eval`: what quantization costs an HF checkpoint."""

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from train.command import UserError, explain_validation, run_command
from train.run_directory import write_json

RESULT_JSON = "result.json"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def quant_eval() -> None:
    """Quantizes HF checkpoints (RTN, GPTQ) and measures what that costs."""


@app.command()
def run(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories of OLMo2s, measured one after the other.")],
    spec: Annotated[list[str], typer.Option(help="What to quantize with, such as gptq-b3-g128. Repeatable.")],
    calibration: Annotated[Path, typer.Option(help="Token file PREFIX the Hessians are estimated on.")],
    evaluation: Annotated[Path, typer.Option("--eval", help="Token file PREFIX the losses are measured on.")],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Of result.json, one per --spec, in the same order.", show_default="HF_DIR/quant/SPEC"),
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(help="Sequences drawn for calibration, none twice.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens the model sees at once.", show_default="the model's context")
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option(help="Take documents until they hold this many targets.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the calibration draw and of the bootstrap.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass; moves results by rounding only.")] = 8,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16, for the full and the quantized model alike.")] = "fp32",
    bootstrap_samples: Annotated[int, typer.Option(help="Resamplings of the documents behind the intervals.")] = 1000,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
) -> None:
    """Writes result.json: losses before and after quantization, with intervals, per document and per layer.

    A spec is (rtn|gptq)-b<bits>-(g<group size>|perchannel)[-asym], for gptq also [-actorder][-damp<fraction>].

    Example: python -m quant_eval run run/hf/step00012000 --calibration data/train --eval data/held_out
    --spec gptq-b3-g128 --spec gptq-b4-g128
    """
    # torch and transformers load in seconds: not for --help or a misspelt spec
    from ckpt_tools.hf_model import read_hf_config
    from quant_eval.specs import parse_spec

    specs = [parse_spec(text) for text in spec]
    outs = _result_directories(hf_dirs, [one.name for one in specs], out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("quant_eval measures in one process; start it without torchrun")
    for hf_dir in hf_dirs:  # not after minutes on the ones before it
        read_hf_config(hf_dir)

    from quant_eval.measurement import Settings, measure

    try:
        settings = Settings(
            calibration=calibration,
            evaluation=evaluation,
            calibration_sequences=calibration_sequences,
            sequence_length=sequence_length,
            eval_tokens=eval_tokens,
            seed=seed,
            batch_size=batch_size,
            dtype=dtype,  # type: ignore[arg-type]
            bootstrap_samples=bootstrap_samples,
            level=level,
        )
    except ValidationError as error:
        raise explain_validation("command line", error) from None
    for hf_dir, directories in zip(hf_dirs, outs, strict=True):
        for directory, result in zip(directories, measure(hf_dir, specs, settings), strict=True):
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / RESULT_JSON, result)


def _result_directories(hf_dirs: list[Path], names: list[str], out: list[Path] | None) -> list[list[Path]]:
    """Where the result of each spec goes, for each HF directory."""
    if out is None:
        directories = [[hf_dir / "quant" / name for name in names] for hf_dir in hf_dirs]
    elif len(hf_dirs) > 1:
        raise UserError("--out names the place of one HF directory's results; leave it out for several")
    elif len(names) != len(out):
        raise UserError(f"{len(names)} --spec but {len(out)} --out; give one --out for each --spec, or none")
    else:
        directories = [out]
    together = [directory for group in directories for directory in group]
    if len(set(together)) != len(together):
        raise UserError("two results would go to the same directory; give each spec and HF directory once")
    for directory in together:
        if directory.exists() and not directory.is_dir():
            raise UserError(f"{directory} is a file; give a directory for result.json")
    return directories


if __name__ == "__main__":
    run_command(app, "quant_eval")
