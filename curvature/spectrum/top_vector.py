"""The top eigenvector of a measurement as a file, a start for the next checkpoint's iteration.

A warm start saves iterations where neighbouring checkpoints share their top eigenvector. What
counts as converged stays the same. What a residual does not see, that a larger eigenvalue was
passed over, becomes likelier the nearer the start is to an eigenvector, so half of the start's
square stays the random probe of a cold one.

Shapes: p parameters of this rank.
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from base.errors import UserError
from base.files import replaced_file, sha256_of
from base.ranks import Ranks
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import read_result
from curvature.products.parameters import Parameters

TOP_VECTOR = "top_vector.safetensors"


def save_top_vector(directory: Path, parameters: Parameters, ranks: Ranks, x_p: Tensor) -> str:
    """Write DIRECTORY/top_vector.safetensors and return its SHA-256; every rank has to call it.

    It has 4 bytes a parameter, which the host memory of rank 0 holds meanwhile.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in parameters.whole(x_p):
        if ranks.rank == 0:
            whole[name] = tensor
    sha256 = ""
    if ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        with replaced_file(directory / TOP_VECTOR) as aside:
            save_file(whole, aside)
        sha256 = sha256_of(directory / TOP_VECTOR)
    ranks.wait()
    return sha256


def warm_start(
    directory: Path, parameters: Parameters, probe_p: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Return the start u + v / |v| of a result's top eigenvector u and a probe v, and its source.

    Raises:
        UserError: the directory holds no such result, another vector than it says, or that of
            another model.
    """
    path = directory / TOP_VECTOR
    top = read_result(directory, Curvature).measured.lambda_max
    if top is None or top.top_vector_sha256 is None or not path.exists():
        raise UserError(
            f"--warm-start {directory} holds no top vector; measure it again with --keep-top-vector"
        )
    if sha256_of(path) != top.top_vector_sha256:
        raise UserError(
            f"{path} is not the vector of the result beside it; measure that checkpoint again"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); measure that checkpoint again") from None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != parameters.shapes:
        raise UserError(
            f"{path} is of a model with other parameters; give a result of the same architecture"
        )
    start_p = parameters.take(tensors)
    start_p.div_(parameters.norm(start_p)).add_(probe_p, alpha=1 / parameters.norm(probe_p))
    return start_p, {"path": str(directory), "top_vector_sha256": top.top_vector_sha256}
