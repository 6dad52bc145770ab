"""The top eigenvector of a measurement as a file, for the next checkpoint's iteration to start from.

A warm start saves iterations where neighbouring checkpoints share their top eigenvector. What counts as converged stays
the same. What a residual does not see, that a larger eigenvalue was passed over, becomes likelier the nearer the start
lies to an eigenvector, so half of the start's square stays the random probe of a cold one.

Shapes: p parameters of this rank.
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckpt_tools.hf_directory import RESULT_JSON, read_result_json
from ckpt_tools.ranks import Ranks
from curvature.parameters import Parameters
from train.command import UserError
from train.run_directory import replaced_file, sha256_of

TOP_VECTOR = "top_vector.safetensors"


def save_top_vector(directory: Path, parameters: Parameters, ranks: Ranks, x_p: Tensor) -> str:
    """Writes DIRECTORY/top_vector.safetensors, 4 bytes a parameter, and gives its SHA-256; every rank has to call it.

    The whole vector lies in the host memory of rank 0 meanwhile.
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


def warm_start(directory: Path, parameters: Parameters, probe_p: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The start u + v / |v| from the top eigenvector u of a result and a probe v, and what a result says of it.

    Raises:
        UserError: the directory holds no such result, another vector than it says, or that of another model.
    """
    path = directory / TOP_VECTOR
    top = read_result_json(directory / RESULT_JSON).get("measured", {}).get("lambda_max") or {}
    if "top_vector_sha256" not in top or not path.exists():
        raise UserError(f"--warm-start {directory} holds no top vector; measure it again with --keep-top-vector")
    if sha256_of(path) != top["top_vector_sha256"]:
        raise UserError(f"{path} is not the vector of the result beside it; measure that checkpoint again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); measure that checkpoint again") from None
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != parameters.shapes:
        raise UserError(f"{path} is of a model with other parameters; give a result of the same architecture")
    start_p = parameters.take(tensors)
    start_p.div_(parameters.norm(start_p)).add_(probe_p, alpha=1 / parameters.norm(probe_p))
    return start_p, {"path": str(directory), "top_vector_sha256": top["top_vector_sha256"]}
