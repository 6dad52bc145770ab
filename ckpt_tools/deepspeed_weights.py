"""Reading weights out of a DeepSpeed checkpoint: `model.safetensors`, whole and under HF names at any ZeRO stage.

Nothing else of the checkpoint is opened.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from train.command import UserError
from train.config import RunConfig
from train.families import parameter_shapes
from train.run_directory import MODEL_WEIGHTS

STORED_DTYPE = {"fp32": "F32", "bf16": "BF16"}  # safetensors' names


def read_hf_weights(checkpoint: Path, run: RunConfig) -> dict[str, Tensor]:
    """Every HF tensor of the model, as it was trained (dtype included), from a hash-checked checkpoint.

    Raises:
        UserError: a key, a shape or a dtype of the file is not the model's, or a key is missing.
    """
    path = checkpoint / MODEL_WEIGHTS
    next_action = f"{checkpoint} is no checkpoint of the model in its run.json; give another"
    shapes, dtype = parameter_shapes(run.model), STORED_DTYPE[run.precision]
    if not path.is_file():
        raise UserError(f"{path} does not exist: {next_action}")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            differing = sorted(names ^ shapes.keys())
            if differing:
                problem = "unknown" if differing[0] in names else "missing"
                raise UserError(f"{problem} key '{differing[0]}' in {MODEL_WEIGHTS}: {next_action}")
            for name, shape in shapes.items():
                stored = file.get_slice(name)
                found = (stored.get_dtype(), tuple(stored.get_shape()))
                if found != (dtype, shape):
                    raise UserError(
                        f"'{name}' is {found[0]} {found[1]} in {MODEL_WEIGHTS}, the model needs {dtype} {shape}: "
                        f"{next_action}"
                    )
            return {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); give another checkpoint") from None
