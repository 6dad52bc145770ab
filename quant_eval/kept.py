"""Results that are there already: the same model, spec and settings are not measured twice.

Imports neither torch nor transformers, so that this costs no time.
"""

from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import sha256_of
from ckpt_tools.hf.directory import DENSE_JSON, LINEAGE_JSON
from ckpt_tools.hf.measured import Outliers, Quantization, Read, Tasks
from ckpt_tools.hf.model import identify, read_hf_config
from ckpt_tools.hf.results import Result, read_result
from quant_eval.paper_tasks import local_files
from quant_eval.quantizer import QuantSpec
from quant_eval.settings import CHECKPOINT, OutlierRunSettings, RunSettings, TaskSettings

PATHS = ("prefix", "path")  # of texts, which may have moved


def kept_run(
    directory: Path,
    hf_dir: Path,
    spec: QuantSpec,
    settings: RunSettings,
    texts: tuple[str | None, str],
) -> Result[Quantization] | None:
    """Return the result in a directory if `run` would measure the same, None otherwise.

    `texts` are the hashes of those for calibration, if any spec reads it, and evaluation.
    """
    request = settings.of_specs([spec]).texts(_context(hf_dir), *texts)
    request |= spec.settings() | {"dtype": settings.dtype}
    result = _same(directory, hf_dir, request, Quantization)
    # Bootstrap and random signs have this seed, too, where no calibration text states it.
    if result is None or result.measured.interval is None:
        return None
    if result.measured.interval.seed != settings.seed:
        return None
    # More than was asked for may be there, not less.
    if settings.per_block and not result.measured.blocks:
        return None
    if settings.save and not (directory / CHECKPOINT / LINEAGE_JSON).exists():
        return None
    dense = directory / DENSE_JSON
    if settings.dense and not (dense.exists() and sha256_of(dense) == result.measured.dense):
        return None
    return result


def kept_tasks(
    directory: Path, hf_dir: Path, spec: QuantSpec, settings: TaskSettings, calibration: str | None
) -> Result[Tasks] | None:
    """Return the result in a directory if `tasks` would measure the same, None otherwise.

    `calibration` is the hash of that text, if any spec reads it.
    """
    request = settings.of_specs([spec]).described(calibration)
    request |= spec.settings() | {"dtype": settings.dtype}
    result = _same(directory, hf_dir, request, Tasks)
    if result is None or set(result.settings["tasks"]) != set(settings.names):
        return None
    # Without --task-files the hub is asked; a result of local documents is another one.
    sources = result.settings["tasks"].items()
    same = all(
        source.get("files") == _file_hashes(name, settings.task_files) for name, source in sources
    )
    return result if same else None


def kept_outliers(
    directory: Path, hf_dir: Path, settings: OutlierRunSettings, sha256: str
) -> Result[Outliers] | None:
    """Return the result in a directory if `outliers` would measure the same, None otherwise.

    `sha256` is the hash of the text.
    """
    return _same(directory, hf_dir, settings.described(_context(hf_dir), sha256), Outliers)


def _context(hf_dir: Path) -> int:
    return int(read_hf_config(hf_dir).get("max_position_embeddings", 0))


def _file_hashes(task: str, directory: Path | None) -> dict[str, str] | None:
    """Return the hash of each local file of a task's documents, as a result holds them."""
    if directory is None:
        return None
    return {str(path): sha256_of(path) for path in local_files(task, directory)}


def _same[Kind: Read](
    directory: Path, hf_dir: Path, request: dict[str, Any], kind: type[Kind]
) -> Result[Kind] | None:
    """Return the result of a directory if it is of that model and has those settings."""
    try:
        result = read_result(directory, kind)
    except UserError:  # none, or none that can be read
        return None
    if not _contains(result.settings, request):
        return None
    # last, for it may read all weights
    same = identify(hf_dir)["weights_digests"] == result.model.weights_digests
    return result if same else None


def _contains(settings: Any, request: Any) -> bool:
    """Return whether settings have all values of a request, their paths aside."""
    if isinstance(request, dict):
        return isinstance(settings, dict) and all(
            key in PATHS or _contains(settings.get(key), value) for key, value in request.items()
        )
    return bool(settings == request)
