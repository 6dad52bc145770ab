"""config.json and generation_config.json of an HF directory."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from base.files import write_json
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.forward import empty_model


def write_configuration(directory: Path, family: str, settings: dict[str, Any], dtype: str) -> None:
    """Write both files for a model of transformers' `model_type` `family`, as save_pretrained."""
    config = AutoConfig.for_model(family, **settings)
    config.architectures = [type(empty_model(config)).__name__]
    config.dtype = DTYPES[dtype]
    config.save_pretrained(directory)
    generation = GenerationConfig(
        eos_token_id=config.eos_token_id, bos_token_id=None, pad_token_id=None
    )
    generation.save_pretrained(directory)


def change_dtype(directory: Path, dtype: str) -> None:
    """Write config.json again with another type of weights, under the key it has there."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    write_json(path, config | {key: str(DTYPES[dtype]).removeprefix("torch.")})
