"""config.json and generation_config.json of an HF directory."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from base.files import write_json
from base.reading import read_object
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.forward import empty_model, read_config
from ckpt_tools.hf.renamed import older_form


def write_configuration(directory: Path, family: str, settings: dict[str, Any], dtype: str) -> None:
    """Write both files for a model of transformers' `model_type` `family`."""
    config = AutoConfig.for_model(family, **settings)
    config.architectures = [type(empty_model(config)).__name__]
    config.save_pretrained(directory)
    complete_configuration(directory, dtype)
    generation = GenerationConfig(
        eos_token_id=config.eos_token_id, bos_token_id=None, pad_token_id=None
    )
    generation.save_pretrained(directory)


def complete_configuration(directory: Path, dtype: str, **more: Any) -> None:
    """Write config.json again, with every renamed key in both forms (`renamed.older_form`).

    Every config.json that is written comes from here.

    Args:
        directory: holds config.json, in either form.
        dtype: of the weights, by its name in `DTYPES`.
        more: keys to add.
    """
    rope = getattr(read_config(directory), "rope_parameters", None)
    path = directory / "config.json"
    config = read_object(path) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    config |= {"rope_parameters": rope} if rope else {}
    write_json(path, config | older_form(config) | more)
