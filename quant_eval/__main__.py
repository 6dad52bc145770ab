"""`python -m quant_eval`: what quantization costs an HF checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import result_directories, write_result
from train.command import explain_validation, one_process_only, run_command

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
    outs = result_directories(hf_dirs, "quant", [one.name for one in specs], out)
    one_process_only("quant_eval")
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
            write_result(directory, result)


if __name__ == "__main__":
    run_command(app, "quant_eval")
