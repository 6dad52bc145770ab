"""python -m curvature: trace and top eigenvalue of the loss Hessian of an HF model."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import RESULT_JSON, result_directories, write_result
from train.command import UserError, explain_validation, one_process_only, run_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
SPECS = ("hutchinson",)


@app.callback()
def main() -> None:
    """Curvature of the loss of HF language models, with its errors."""


@app.command()
def run(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories of OLMo2s, measured one after the other.")],
    spec: Annotated[str, typer.Option(help="What to measure: hutchinson (trace and largest eigenvalue).")],
    data: Annotated[Path, typer.Option(help="Prefix of the token files made by 'python -m train prepare'.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory of result.json.", show_default="HF_DIR/curvature/SPEC")
    ] = None,
    pairs: Annotated[int, typer.Option(help="(probe, microbatch) pairs behind the trace, 2 or more.")] = 32,
    microbatch_sequences: Annotated[int, typer.Option(help="Sequences of one Hessian product.")] = 2,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens; by default the model's context.")] = None,
    eigen_sequences: Annotated[int, typer.Option(help="Sequences of the fixed batch of the top eigenvalue.")] = 8,
    max_iterations: Annotated[int, typer.Option(help="Products on the fixed batch at most.")] = 50,
    tolerance: Annotated[float, typer.Option(help="|Hx - lambda x| / |lambda| that counts as converged.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the probes and of the order of the sequences.")] = 0,
    route: Annotated[str, typer.Option(help="Hessian products: dual (exact) or finite-difference.")] = "dual",
    checkpointing: Annotated[bool, typer.Option(help="Keep only the layers' inputs: slower, far less memory.")] = False,
) -> None:
    """Measures trace and largest eigenvalue of the Hessian of the mean loss per token.

    Example: python -m curvature run hf/step00000400 --spec hutchinson --data data/held_out
    """
    from ckpt_tools.hf_model import read_hf_config
    from curvature.measure import HutchinsonSpec, measure  # transformers takes seconds, --help should not

    if spec not in SPECS:
        raise UserError(f"--spec '{spec}' is unknown; give one of: {', '.join(SPECS)}")
    directories = result_directories(hf_dirs, "curvature", [spec], [out] if out else None)
    one_process_only("curvature")
    for hf_dir in hf_dirs:  # not after minutes on the ones before it
        read_hf_config(hf_dir)
    try:
        settings = HutchinsonSpec(
            name="hutchinson",
            pairs=pairs,
            microbatch_sequences=microbatch_sequences,
            sequence_length=sequence_length,
            eigen_sequences=eigen_sequences,
            max_iterations=max_iterations,
            tolerance=tolerance,
            seed=seed,
            route=route,  # type: ignore[arg-type]
            checkpointing=checkpointing,
        )
    except ValidationError as error:
        raise explain_validation("curvature run", error) from None
    for hf_dir, (directory,) in zip(hf_dirs, directories, strict=True):
        result = measure(hf_dir, settings, data)
        write_result(directory, result)
        trace, top = result["measured"]["trace"], result["measured"]["lambda_max"]
        note = "" if top["converged"] else " (not converged)"
        typer.echo(
            f"trace {trace['mean']:.6g} +- {trace['standard_error']:.2g}  lambda_max {top['value']:.6g}{note}  "
            f"loss {result['measured']['loss']:.4f} nats/token  -> {directory / RESULT_JSON}"
        )


if __name__ == "__main__":
    run_command(app, "curvature")
