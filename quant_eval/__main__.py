"""`python -m quant_eval`: what quantization costs an HF checkpoint."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import result_directories, write_result
from quant_eval.comparing import compare
from quant_eval.tasks.command import tasks
from train.command import explain_validation, run_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def quant_eval() -> None:
    """Quantizes HF checkpoints and measures what that costs."""


@app.command()
def run(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories, measured one after the other.")],
    spec: Annotated[list[str], typer.Option(help="What to quantize with, such as gptq-b3-g128. Repeatable.")],
    calibration: Annotated[Path, typer.Option(help="Token file PREFIX the Hessians are estimated on.")],
    evaluation: Annotated[Path, typer.Option("--eval", help="Token file PREFIX the losses are measured on.")],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Of result.json, one per --spec, in the same order.", show_default="HF_DIR/quant/SPEC"),
    ] = None,
    calibration_sequences: Annotated[int, typer.Option(help="Sequences drawn for calibration, none twice.")] = 128,
    calibration_seeds: Annotated[int, typer.Option(help="Calibration draws, each quantized and measured.")] = 1,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens the model sees at once.", show_default="2048, or its context if less")
    ] = None,
    eval_tokens: Annotated[
        int | None, typer.Option(help="Take documents until they hold this many targets.", show_default="all")
    ] = None,
    documents: Annotated[
        str, typer.Option(help="separate, or concatenated without separator as arXiv:2510.06213 did.")
    ] = "separate",
    per_block: Annotated[bool, typer.Option(help="Also quantize each block alone, and all but it.")] = False,
    save: Annotated[
        bool, typer.Option(help="Also save a checkpoint in GPTQ's format; specs that end in -s16.")
    ] = False,
    dense: Annotated[
        bool, typer.Option(help="Also write the dequantized weights that were measured, to the result's dense/.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the first calibration draw and of the bootstrap.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass; moves results by rounding only.")] = 8,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16, for the full and the quantized model alike.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    scratch: Annotated[
        Path | None, typer.Option(help="Directory for activations too many for memory.", show_default="memory")
    ] = None,
    bootstrap_samples: Annotated[int, typer.Option(help="Resamplings of the documents behind the intervals.")] = 1000,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
) -> None:
    """Writes result.json: losses before and after quantization, with intervals, per document and per layer.

    'python -m quant_eval methods' lists what a spec can be. Under torchrun all processes share the work.

    Example: python -m quant_eval run run/hf/step00012000 --calibration data/train --eval data/held_out
    --spec gptq-b3-g128 --spec gptq-b4-g128
    """
    # torch and transformers load in seconds: not for --help or a misspelt spec
    from ckpt_tools.hf_model import read_hf_config
    from quant_eval.specs import parse_spec

    specs = [parse_spec(text) for text in spec]
    outs = result_directories(hf_dirs, "quant", [one.name for one in specs], out)

    from ckpt_tools.ranks import start
    from quant_eval.families import ARCHITECTURES
    from quant_eval.measurement import measure
    from quant_eval.settings import CalibrationSettings, ComputeSettings, EvaluationSettings

    for hf_dir in hf_dirs:  # not after minutes on the ones before it
        read_hf_config(hf_dir, ARCHITECTURES)
    try:
        drawn = CalibrationSettings(
            prefix=calibration,
            sequences=calibration_sequences,
            sequence_length=sequence_length,
            seed=seed,
            seeds=calibration_seeds,
        )
        measured_on = EvaluationSettings(
            prefix=evaluation,
            max_tokens=eval_tokens,
            sequence_length=sequence_length,
            documents=documents,  # type: ignore[arg-type]
            bootstrap_samples=bootstrap_samples,
            level=level,
            seed=seed,
        )
        compute = ComputeSettings(dtype=dtype, batch_size=batch_size, device=device, scratch=scratch)  # type: ignore[arg-type]
    except ValidationError as error:
        raise explain_validation("command line", error) from None
    ranks = start(compute.device)
    for hf_dir, directories in zip(hf_dirs, outs, strict=True):
        results = measure(hf_dir, specs, directories, drawn, measured_on, compute, ranks, per_block, save, dense)
        for directory, result in zip(directories, results, strict=True):
            if ranks.rank == 0:
                write_result(directory, result)


@app.command()
def methods() -> None:
    """Lists the quantization methods, the bits they take, their settings and where they come from.

    Example: python -m quant_eval methods
    """
    from quant_eval.methods import METHODS
    from quant_eval.specs import EXAMPLES

    for name, method in METHODS.items():
        settings = ", ".join(f"{key} {'stated' if value is None else value}" for key, value in method.defaults.items())
        print(f"{name:<10} bits {', '.join(map(str, method.bits)):<20} {method.source}\n{'':<10} {settings}")
    print(f"\nexamples: {EXAMPLES}")


app.command()(compare)
app.command()(tasks)

if __name__ == "__main__":
    run_command(app, "quant_eval")
