"""Damage of the files of a step: a record that was changed, or a file beside it that is gone."""

from pathlib import Path

from base.errors import UserError
from base.reading import read_object, read_sealed
from ckpt_tools.hf.directory import LINEAGE_JSON, RESULT_JSON
from ckpt_tools.released.download_record import DOWNLOAD_JSON
from study.paths import MLFLOW_STORE
from train.run.directory import CHECKPOINT_JSON

SEALED = (CHECKPOINT_JSON, LINEAGE_JSON, DOWNLOAD_JSON, RESULT_JSON)


def remedy(kind: str) -> str:
    """Return what to do about a damaged output of a step of this kind.

    Training makes its newest checkpoint again by itself, and no earlier one: that would cost all
    later ones without a question.
    """
    if kind == "train":
        return (
            "restore it, or move it and the checkpoints after it away: 'python -m study run' trains"
            " from the one before"
        )
    return "'python -m study run' makes it again"


def changed_record(output: Path, kind: str) -> str | None:
    """Return what is wrong with a record that a step of a kind left; None for a sound one."""
    if output.name not in SEALED:
        return None
    try:
        read_sealed(output, remedy(kind))
    except UserError as error:
        return str(error)
    return None


def gone(output: Path, kind: str) -> Path | None:
    """Return the first file that an unchanged record vouches for and that is not there whole.

    By existence and size: hashes of models and texts are compared where they are read. Shards of a
    checkpoint are not looked for, since nothing but an export reads them.

    Args:
        output: the record.
        kind: of the step that left it.
    """
    if kind in ("export", "average", "download") and output.name in (LINEAGE_JSON, DOWNLOAD_JSON):
        files = read_object(output).get("files", {})
    elif kind == "prepare":
        content = read_object(output)
        files = {f"{output.stem}.{key}": content[key] for key in ("bin", "idx") if key in content}
    elif kind == "mirror":
        store = output.parents[1] / MLFLOW_STORE
        is_own = str(read_object(output).get("store")).endswith(f"/{MLFLOW_STORE}")
        return store if is_own and not store.is_file() else None
    else:
        return None

    for name, record in files.items():
        path: Path = output.parent / name
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            return path
    return None
