"""Files of an HF directory besides the model: its lineage or download, and its results.

A result is at <measurement>/<spec>/result.json. Names are made here and nowhere else. Needs neither
torch nor transformers.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from base.digests import Algorithm
from base.environment import environment
from base.errors import UserError
from base.files import (
    FileRecord,
    check_inside,
    committed_directory,
    first_damage,
    fsync_path,
    record_file,
    replace_directory,
    scratch_directory,
    unfinished_of,
    write_sealed,
)
from base.frozen import Frozen
from base.reading import as_model, read_sealed

LINEAGE_JSON = "lineage.json"
DOWNLOAD_JSON = "download.json"
HUB_STATE = ".cache"  # directory of huggingface_hub's notes, beside the files that it fetched
RESULT_JSON = "result.json"
DENSE_JSON = "dense/dense.json"  # below a result's directory, beside the dequantized weights
VERIFICATION_PROBE = "verification/probe.safetensors"  # computed by the training engine
REMAKE = (  # after a damage of lineage.json
    "restore it, run the study again, or make the directory again with 'python -m ckpt_tools"
    " export' or 'average'"
)
CONFIGURATION_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (  # of a tokenizer alone, or of a whole HF model
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
Place = Literal["quant", "curvature", "tasks", "outliers"]  # below an HF directory


def result_directories(
    hf_dirs: list[Path], measurement: Place, specs: list[str], out: list[Path] | None
) -> list[list[Path]]:
    """Return the directory of each spec's result, for each HF directory; `out` names those of one.

    Raises:
        UserError: `out` does not fit, two results would share a directory, or a file is in the way.
    """
    if out is not None and (len(hf_dirs) > 1 or len(specs) != len(out)):
        raise UserError(
            f"{len(out)} --out for {len(hf_dirs) * len(specs)} result(s); give one for each result"
            " of one HF directory, leave it out for several"
        )
    directories = [[hf_dir / measurement / spec for spec in specs] for hf_dir in hf_dirs]
    directories = directories if out is None else [out]
    together = [directory for group in directories for directory in group]
    if len(set(together)) != len(together):
        raise UserError(
            "two results would go to the same directory; give each spec and HF directory once"
        )

    for hf_dir, group in zip(hf_dirs, directories, strict=True):
        # beside a model that is missing nothing is checked: who reads the model names it
        for directory in group if out is not None or hf_dir.exists() else ():
            _check_writable(directory)
    return directories


def _check_writable(directory: Path) -> None:
    """Raise UserError for a directory that cannot be made or written to."""
    ancestor = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not ancestor.is_dir():
        raise UserError(f"{ancestor} is a file; give a directory for {RESULT_JSON}")
    if not os.access(ancestor, os.W_OK):
        raise UserError(f"{ancestor} is not writable; give another --out for {RESULT_JSON}")


def hf_directory_of(path: Path) -> Path:
    """Return the HF directory of a model: itself, or that which a result was quantized from.

    Raises:
        UserError: the path is neither an HF directory nor a result below one.
    """
    if (path / "config.json").is_file():
        return path
    # HF_DIR/quant/SPEC, and HF_DIR/blocks/SPEC in a study; a relative path may lack the first parts
    is_whole = len(path.parts) > 2 and ".." not in path.parts
    above = (path if is_whole else path.resolve()).parent.parent
    if (path / RESULT_JSON).is_file() and (above / "config.json").is_file():
        return above
    raise UserError(
        f"{path} is neither an HF directory nor a result below one; give a directory made by"
        " 'python -m ckpt_tools export', or HF_DIR/quant/SPEC made by 'python -m quant_eval run"
        " --dense'"
    )


def compared_results(results: list[Path]) -> list[Path]:
    """Return the result.json of each result or directory; UserError unless two or more differ."""
    paths = [path / RESULT_JSON if path.is_dir() else path for path in results]
    if len(paths) < 2:
        raise UserError("there is nothing to compare with; give two results or more")
    for index, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:index]]:
            raise UserError(f"{path} is given twice; give every result once")
    return paths


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write result.json, sealed, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    write_sealed(directory / RESULT_JSON, result)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> list[str]:
    """Copy those of the files that `source` has; return their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present


def write_lineage(
    directory: Path,
    lineage: dict[str, Any],
    known_records: dict[str, FileRecord],
    algorithm: Algorithm = "blake3",
) -> None:
    """Write lineage.json, sealed, the last file of a model, with size and hash of all others.

    The environment is this process's, unless `lineage` has one.

    Files of `known_records` need not be read again.
    """
    paths = [path for path in directory.rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(directory)) for path in paths)
    files = {
        name: known_records.get(name) or record_file(directory / name, algorithm) for name in names
    }
    recorded = {name: record.model_dump() for name, record in files.items()}
    content = {**lineage, "files": recorded}
    write_sealed(directory / LINEAGE_JSON, {"environment": environment(), **content})


def restore(hf_dir: Path, again: Path) -> None:
    """Put right a damaged HF directory by the same one, made again beside it.

    Where the files are those that lineage.json records, only damaged ones are replaced: what was
    measured of the model stays, and stays valid. Where lineage.json itself is missing or damaged,
    it is replaced if all other files are as they were made again.

    Raises:
        UserError: lineage.json is damaged, and so is another file, or it is of another model.
    """
    records, recorded = vouched_files(again), vouched_files(hf_dir)
    if recorded is None:
        damage = first_damage(hf_dir, records or {})
        if damage:
            raise UserError(
                f"{hf_dir / LINEAGE_JSON} is missing or was changed, and {damage}; move the"
                " directory away and run again"
            )
        damaged = [LINEAGE_JSON]
    elif recorded != records:
        # Other bytes: nothing that was measured of the old files holds, so all of it goes.
        replace_directory(hf_dir, again)
        return
    else:
        damaged = [name for name in recorded if first_damage(hf_dir, {name: recorded[name]})]
    # A kill between two files leaves the rest damaged, which the next call replaces.
    for name in damaged:
        (hf_dir / name).parent.mkdir(exist_ok=True)
        os.replace(again / name, hf_dir / name)
        fsync_path((hf_dir / name).parent)


@contextmanager
def remade(hf_dir: Path, *, damaged: bool) -> Iterator[Path]:
    """Yield an empty directory for a whole HF directory, which takes the place of what is there.

    If that is `damaged`, only what has to be is replaced, see `restore`.
    """
    if not damaged:
        with committed_directory(hf_dir) as aside:
            yield aside
        return
    with scratch_directory(unfinished_of(hf_dir)) as aside:
        yield aside
        restore(hf_dir, aside)


def vouched_files(hf_dir: Path) -> dict[str, FileRecord] | None:
    """Return the files that lineage.json vouches for; None where it is missing or damaged."""
    try:
        lineage = read_lineage(hf_dir)
    except UserError:
        return None
    return lineage[1] if lineage else None


def may_be_restored(hf_dir: Path) -> bool:
    """Return whether a directory holds weights without a lineage.json that can be read.

    Which model it is shows when that is made again: see `restore`.
    """
    return vouched_files(hf_dir) is None and any(hf_dir.glob("*.safetensors"))


def read_lineage(hf_dir: Path) -> tuple[dict[str, Any], dict[str, FileRecord]] | None:
    """Return the lineage of a directory and the files it vouches for; None without lineage.json.

    UserError if lineage.json was changed after it was written.
    """
    path = hf_dir / LINEAGE_JSON
    if not path.exists():
        return None
    lineage = read_sealed(path, REMAKE)
    try:
        files = {
            name: FileRecord.model_validate(record) for name, record in lineage.pop("files").items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} lists no files; {REMAKE}") from None
    check_inside(path, files)
    return lineage, files


class Conversion(Frozen):
    """Origin of a safetensors file that was converted from a pickle.

    Attributes:
        pickle: name of the file.
        record: its size and hash.
        left_out: names of tensors that config.json ties to another of the file.
        torch: version that opened it.
    """

    pickle: str
    record: FileRecord
    left_out: list[str]
    torch: str


class DownloadRecord(Frozen):
    """Origin and files of a download. Written last: without it there is none.

    Attributes:
        repo: of the hub, or the run that they were exported from.
        revision: of the repository.
        commit: of the revision; None: copied from a directory that does not record it.
        files: size and hash of each.
        converted: origin of each file that was a pickle.
    """

    repo: str
    revision: str
    commit: str | None
    files: dict[str, FileRecord]
    converted: dict[str, Conversion] = Field(default_factory=dict)


def read_download(directory: Path) -> DownloadRecord | None:
    """Return download.json of a directory, None if it has none; UserError if it was changed."""
    path = directory / DOWNLOAD_JSON
    if not path.is_file():
        return None
    record = as_model(DownloadRecord, read_sealed(path, "download it again"), path)
    pickles = [conversion.pickle for conversion in record.converted.values()]
    check_inside(path, [*record.files, *record.converted, *pickles])
    return record
