"""`python -m curvature slice`: the loss on a plane through a checkpoint, drawn, and its SAM sharpness."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from ckpt_tools.hf_directory import RESULT_JSON, result_directories, write_result
from train.command import UserError, explain_validation
from train.run_directory import replaced_file

SLICE_PNG = "slice.png"
CHECKPOINTS_EXTENT, RANDOM_EXTENT = 0.35, 1.0


def slice_command(
    hf_dir: Annotated[Path, typer.Argument(help="HF directory of theta_K, the origin of the plane.")],
    data: Annotated[Path, typer.Option(help="Prefix of the token files made by 'python -m train prepare'.")],
    previous: Annotated[Path | None, typer.Option(help="HF directory of theta_K-1.", show_default=False)] = None,
    quantized: Annotated[
        Path | None, typer.Option(help="Result of 'quant_eval run --dense' for HF_DIR.", show_default=False)
    ] = None,
    random: Annotated[bool, typer.Option(help="Two random directions, filter-normalised, instead of both.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory of result.json and slice.png.", show_default="HF_DIR/curvature/NAME")
    ] = None,
    grid: Annotated[int, typer.Option(help="Points along either axis, 3 or more.")] = 15,
    extent: Annotated[
        float | None,
        typer.Option(
            help="How far the grid reaches beyond its points, in units of the longer of its two directions; a random "
            "one is as long as all matrices together.",
            show_default=f"{CHECKPOINTS_EXTENT}; {RANDOM_EXTENT} for --random",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of the text that every loss is over.")] = 16,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens; by default the model's context.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass; moves results by rounding only.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the order of the sequences and of random directions.")] = 0,
    radii: Annotated[str, typer.Option(help="Radii of SAM's sharpness, Euclidean, with commas.")] = "0.05,0.1,0.2",
    sam_steps: Annotated[int, typer.Option(help="Steps of the ascent; 1 is SAM, more find the worst of all.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measures the loss on a plane through weights, and how far it rises uphill.

    The plane goes through theta_K, theta_K-1 and the quantized theta_K (arXiv:2510.06213), or along random directions
    (arXiv:1712.09913). Distances in it are Euclidean. Under torchrun all processes share the points.

    Example: python -m curvature slice hf/step00000640 --data data/held_out --previous hf/step00000592
    --quantized hf/step00000640/quant/gptq-b3-g128
    """
    if random and (previous or quantized):
        raise UserError("--random takes the place of --previous and --quantized; leave one or the other out")
    if not random and not (previous and quantized):
        raise UserError("a plane takes both --previous and --quantized; give both, or --random")
    name = "slice-random" if random else f"slice-{quantized.resolve().name}"  # type: ignore[union-attr]
    ((directory,),) = result_directories([hf_dir], "curvature", [name], [out] if out else None)
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device '{device}' is unknown; give cpu or cuda")
    try:
        distances = tuple(float(text) for text in radii.split(","))
    except ValueError:
        raise UserError(f"--radii '{radii}' are no numbers; give such as 0.05,0.1") from None
    if any(not distance > 0 for distance in distances):
        raise UserError(f"--radii '{radii}': every radius is above zero; correct it")

    from ckpt_tools.ranks import start  # torch and transformers take seconds, --help should not
    from curvature.slices.figure import draw_slice
    from curvature.slices.measurement import Ends, SliceSpec, measure

    try:
        spec = SliceSpec(
            name=name,
            grid=grid,
            extent=extent if extent is not None else RANDOM_EXTENT if random else CHECKPOINTS_EXTENT,
            sequences=sequences,
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            radii=distances,
            sam_steps=sam_steps,
        )
    except ValidationError as error:
        raise explain_validation("curvature slice", error) from None
    ranks = start(device)
    result = measure(hf_dir, spec, data, Ends(previous, quantized) if previous and quantized else None, ranks)
    if ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with replaced_file(directory / SLICE_PNG) as aside:
            draw_slice(result).savefig(aside, format="png", metadata={"Software": None})
        write_result(directory, result)
        for row in result["measured"]["sam"]["radii"]:
            typer.echo(
                f"SAM at radius {row['radius']:g}: {row['sharpness']:.4g} +- {row['standard_error']:.2g} nats/token "
                f"(first order {row['first_order']:.4g})"
            )
        for point in result["measured"]["points"][1:]:
            typer.echo(
                f"{point['name']} at ({point['x']:.4g}, {point['y']:.4g}): {point['increase']:+.4g} "
                f"+- {point['increase_standard_error']:.2g} nats/token over theta_K"
            )
        typer.echo(f"-> {directory / RESULT_JSON}, {SLICE_PNG}")
