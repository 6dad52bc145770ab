"""`python -m curvature`: the sharpness of the loss of HF language models, with its errors."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import RESULT_JSON, result_directories, write_result
from curvature.comparing import compare_command
from curvature.slices.command import slice_command
from curvature.step.command import step_command
from train.command import UserError, explain_validation, run_command

if TYPE_CHECKING:
    from curvature.settings import CurvatureSettings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Curvature of the loss of HF language models, with its errors."""


@app.command()
def run(
    hf_dirs: Annotated[list[Path], typer.Argument(help="HF directories, measured one after the other.")],
    spec: Annotated[
        str, typer.Option(help="hutchinson, lanczos, power (as arXiv:2510.06213), or hutch++ or xtrace (small models).")
    ],
    data: Annotated[Path, typer.Option(help="Prefix of the token files made by 'python -m train prepare'.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory of result.json.", show_default="HF_DIR/curvature/SPEC")
    ] = None,
    pairs: Annotated[int | None, typer.Option(help="hutchinson: pairs of a probe and a microbatch, at most.")] = None,
    probes_per_microbatch: Annotated[int | None, typer.Option(help="hutchinson: probes on each microbatch.")] = None,
    relative_error: Annotated[
        float | None, typer.Option(help="hutchinson: stop when standard error / |trace| is no more.")
    ] = None,
    norm_pairs: Annotated[int | None, typer.Option(help="hutchinson: pairs with probes of the norms alone.")] = None,
    companion_pairs: Annotated[
        int | None, typer.Option(help="hutchinson: microbatches of the Gauss-Newton and Fisher traces.")
    ] = None,
    products: Annotated[int | None, typer.Option(help="hutch++, xtrace: Hessian products of the trace.")] = None,
    probes: Annotated[int | None, typer.Option(help="power: probes of the trace.")] = None,
    largest: Annotated[int | None, typer.Option(help="lanczos: largest eigenvalues.")] = None,
    smallest: Annotated[int | None, typer.Option(help="lanczos: smallest eigenvalues.")] = None,
    starts: Annotated[int | None, typer.Option(help="lanczos: start vectors of the density.")] = None,
    steps: Annotated[int | None, typer.Option(help="lanczos: steps of each of them.")] = None,
    fixed_sequences: Annotated[int | None, typer.Option(help="Sequences of the fixed batch of eigenvalues.")] = None,
    lambda_max: Annotated[
        bool | None,
        typer.Option(
            "--lambda-max/--no-lambda-max",
            help="hutchinson, hutch++, xtrace: the top eigenvalue too, which takes vectors over all weights.",
            show_default="--lambda-max",
        ),
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(help="Result of the checkpoint before, whose top vector the iteration starts from.")
    ] = None,
    keep_top_vector: Annotated[
        bool, typer.Option("--keep-top-vector", help="Write top_vector.safetensors, 4 bytes a weight, for that.")
    ] = False,
    max_iterations: Annotated[int | None, typer.Option(help="Iterations on the fixed batch at most.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="|Hx - lambda x| / |lambda| that counts as converged.")
    ] = None,
    microbatch_sequences: Annotated[int | None, typer.Option(help="Sequences of one Hessian product.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens; by default the model's context.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the probes and of the order of the sequences.")] = None,
    level: Annotated[float | None, typer.Option(help="Coverage of the intervals.")] = None,
    route: Annotated[str | None, typer.Option(help="Products: dual (exact) or finite-difference.")] = None,
    attention: Annotated[str | None, typer.Option(help="finite-difference: transformers' kernel.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16, of the dual layers' matrices.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing", help="Keep only the blocks' inputs: slower, far less memory.")
    ] = None,
    sharding: Annotated[
        str | None, typer.Option(help="none: ranks share the pairs; fsdp: they share the model.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    vectors: Annotated[str | None, typer.Option(help="device or host: where vectors over all weights lie.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it would cost; config.json is enough.")
    ] = False,
    world_size: Annotated[int | None, typer.Option(help="--dry-run: GPUs.", show_default="1")] = None,
    gpu: Annotated[str | None, typer.Option(help="--dry-run: h100, h200 or a100.", show_default="h100")] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="--dry-run: GB of a node.", show_default="this machine's")
    ] = None,
) -> None:
    """Writes result.json: trace and eigenvalues of the Hessian of the mean loss per token, with their errors.

    The settings' defaults are those of the spec. Under torchrun all processes share the work.

    Example: python -m curvature run hf/step00000400 --spec hutchinson --data data/held_out
    """
    beside = {"hf_dirs", "spec", "data", "out", "dry_run", "world_size", "gpu", "host_memory"}
    beside |= {"warm_start", "keep_top_vector"}
    given = {k: v for k, v in locals().items() if k not in (*beside, "beside") and v is not None}
    directories = [group[0] for group in result_directories(hf_dirs, "curvature", [spec], [out] if out else None)]

    from ckpt_tools.hf_model import read_hf_config  # torch and transformers take seconds, --help should not
    from ckpt_tools.ranks import start
    from curvature.measurement import TopVector, measure

    settings = _settings(spec, given)
    if (warm_start or keep_top_vector) and (spec == "power" or not settings.has_eigenvalues):
        raise UserError("--warm-start and --keep-top-vector belong to Lanczos's lambda_max; leave them out")
    for hf_dir in hf_dirs:  # not after minutes on the ones before it
        read_hf_config(hf_dir)
    if (world_size, gpu, host_memory) != (None, None, None) and not dry_run:
        raise UserError("--world-size, --gpu and --host-memory belong to --dry-run; leave them out, or give it")
    if dry_run:
        from ckpt_tools.forward import read_config
        from curvature.cost import Plan, cost_lines, estimate

        plan = Plan.of(world_size, gpu, host_memory)
        for hf_dir in hf_dirs:
            cost = estimate(read_config(hf_dir), settings, plan)
            typer.echo("\n".join([str(hf_dir), *cost_lines(cost, settings, plan)]))
        return
    ranks = start(settings.device)
    for hf_dir, directory in zip(hf_dirs, directories, strict=True):
        top_vector = TopVector(warm_start, directory if keep_top_vector else None)
        result = measure(hf_dir, settings, data, ranks, top_vector)
        if ranks.rank == 0:
            write_result(directory, result)
            typer.echo(f"{_in_words(result['measured'])}  -> {directory / RESULT_JSON}")


def _settings(spec: str, given: dict[str, Any]) -> "CurvatureSettings":
    from curvature.settings import SPECS

    if spec not in SPECS:
        raise UserError(f"--spec '{spec}' is unknown; give one of: {', '.join(SPECS)}")
    for name in sorted(given.keys() - SPECS[spec].model_fields.keys()):
        raise UserError(f"--{name.replace('_', '-')} does not belong to --spec {spec}; leave it out")
    try:
        settings = SPECS[spec].model_validate(given | {"name": spec})
    except ValidationError as error:
        raise explain_validation("curvature run", error) from None
    settings.check()
    return settings


def _in_words(measured: dict[str, Any]) -> str:
    trace, top = measured["trace"], measured.get("lambda_max")
    words = f"trace {trace['mean']:.6g} +- {trace['standard_error']:.2g}"
    if top:
        words += f"  lambda_max {top['value']:.6g}{'' if top['converged'] else ' (not converged)'}"
    return f"{words}  loss {measured['loss']:.4f} nats/token"


app.command("step")(step_command)
app.command("slice")(slice_command)
app.command("compare")(compare_command)


if __name__ == "__main__":
    run_command(app, "curvature")
