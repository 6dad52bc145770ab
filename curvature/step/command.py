"""`python -m curvature step`: what the second order says of a quantized model's loss, against what it is."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import RESULT_JSON, result_directories, write_result
from train.command import UserError, explain_validation


def step_command(
    hf_dir: Annotated[Path, typer.Argument(help="HF directory of the full-precision model.")],
    quantized: Annotated[
        list[Path], typer.Option(help="Result directory of 'quant_eval run --dense' for HF_DIR. Repeatable.")
    ],
    data: Annotated[Path, typer.Option(help="Prefix of the token files made by 'python -m train prepare'.")],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Of result.json, one per --quantized.", show_default="HF_DIR/curvature/step-SPEC"),
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Behind every figure.")] = 16,
    microbatch_sequences: Annotated[int, typer.Option(help="Sequences of one Hessian product.")] = 2,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens; by default the model's context.")] = None,
    seed: Annotated[int, typer.Option(help="Of random directions and of the order of the sequences.")] = 0,
    level: Annotated[float, typer.Option(help="Coverage of the intervals.")] = 0.95,
    route: Annotated[str, typer.Option(help="Products: dual (exact) or finite-difference.")] = "dual",
    attention: Annotated[str | None, typer.Option(help="finite-difference: transformers' kernel.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Keep only the blocks' inputs.")] = False,
    sharding: Annotated[str, typer.Option(help="none, or fsdp under torchrun.")] = "none",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    vectors: Annotated[str, typer.Option(help="device or host: where vectors over all weights lie.")] = "device",
) -> None:
    """Writes result.json: predicted and measured loss increase of the quantization step, in all and block by block.

    Predicted is g.delta + delta'H delta / 2 for delta = quantized - full precision; measured is the difference of the
    losses of the same microbatches. Also whether the step is sharper than a random one.

    Example: python -m curvature step hf/step00000640 --quantized hf/step00000640/quant/gptq-b3-g128
    --data data/held_out
    """
    names = [f"step-{directory.resolve().name}" for directory in quantized]
    (directories,) = result_directories([hf_dir], "curvature", names, out)
    if taken := {path.resolve() for path in directories} & {path.resolve() for path in quantized}:
        raise UserError(f"{taken.pop()} holds the result to be explained, which would be lost; give another --out")

    from ckpt_tools.ranks import start  # torch and transformers take seconds, --help should not
    from curvature.step.measurement import StepSettings, measure

    try:
        settings = StepSettings(
            microbatches=microbatches,
            microbatch_sequences=microbatch_sequences,
            sequence_length=sequence_length,
            seed=seed,
            level=level,
            route=route,  # type: ignore[arg-type]
            attention=attention,  # type: ignore[arg-type]
            checkpointing=checkpointing,
            sharding=sharding,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
            vectors=vectors,  # type: ignore[arg-type]
        )
    except ValidationError as error:
        raise explain_validation("curvature step", error) from None
    settings.check()
    ranks = start(device)
    for result_dir, directory in zip(quantized, directories, strict=True):
        result = measure(hf_dir, result_dir, settings, data, ranks)
        if ranks.rank == 0:
            write_result(directory, result)
            whole = result["measured"]["whole"]
            predicted, measured = whole["predicted"], whole["measured"]
            typer.echo(
                f"predicted {predicted['mean']:.5g} +- {predicted['standard_error']:.2g}  measured "
                f"{measured['mean']:.5g} +- {measured['standard_error']:.2g} nats/token  -> {directory / RESULT_JSON}"
            )
