"""What lies in an HF directory besides the model: its lineage, and results at <measurement>/<spec>/result.json.

Names are made here and nowhere else. Needs neither torch nor transformers.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from train.command import UserError
from train.run_directory import FileRecord, check_inside, write_json

LINEAGE_JSON = "lineage.json"
RESULT_JSON = "result.json"
DENSE_JSON = "dense/dense.json"  # below a result's directory; the dequantized weights it vouches for lie beside it
VERIFICATION_PROBE = "verification/probe.safetensors"  # what the training engine computed, which HF has to reproduce
# What makes up a tokenizer; its directory may be a whole HF model's.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
Measurement = Literal["quant", "curvature"]


def result_directory(hf_dir: Path, measurement: Measurement, spec: str) -> Path:
    """Where the result of one spec belongs if nothing else is asked for."""
    return hf_dir / measurement / spec


def result_directories(
    hf_dirs: list[Path], measurement: Measurement, specs: list[str], out: list[Path] | None
) -> list[list[Path]]:
    """Where the result of each spec goes, for each HF directory: `out`, if given, names them for a single one.

    Raises:
        UserError: `out` does not fit, two results would share a directory, or a file is in the way.
    """
    if out is None:
        directories = [[result_directory(hf_dir, measurement, spec) for spec in specs] for hf_dir in hf_dirs]
    elif len(hf_dirs) > 1:
        raise UserError("--out names the place of one HF directory's results; leave it out for several")
    elif len(specs) != len(out):
        raise UserError(f"{len(specs)} --spec but {len(out)} --out; give one --out for each --spec, or none")
    else:
        directories = [out]
    together = [directory for group in directories for directory in group]
    if len(set(together)) != len(together):
        raise UserError("two results would go to the same directory; give each spec and HF directory once")
    for directory in together:
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{there} is a file; give a directory for {RESULT_JSON}")
        if not os.access(there, os.W_OK):
            raise UserError(f"{there} is not writable; give another --out for {RESULT_JSON}")
    return directories


def compared_results(results: list[Path]) -> list[Path]:
    """The result.json of each result or its directory; UserError unless they are two or more, all different."""
    paths = [path / RESULT_JSON if path.is_dir() else path for path in results]
    if len(paths) < 2:
        raise UserError("there is nothing to compare with; give two results or more")
    for index, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:index]]:
            raise UserError(f"{path} is given twice; give every result once")
    return paths


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Writes result.json, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RESULT_JSON, result)


def read_result_json(path: Path) -> dict[str, Any]:
    """The content of a result.json; UserError if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the directory of a result") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValueError):
        raise UserError(f"{path} is no result of a measurement; measure again") from None


def read_lineage(hf_dir: Path) -> tuple[dict[str, Any], dict[str, FileRecord]] | None:
    """Where the directory comes from, and the files it vouches for; None for a directory without lineage.json."""
    path = hf_dir / LINEAGE_JSON
    if not path.exists():
        return None
    try:
        lineage = json.loads(path.read_text())
        files = {name: FileRecord.model_validate(record) for name, record in lineage.pop("files").items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValidationError):
        raise UserError(f"{path} is damaged; remove {hf_dir} and export the checkpoint again") from None
    check_inside(path, files)
    return lineage, files
