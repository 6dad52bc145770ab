"""Revisions that cannot be measured, told by their files' names and config.json alone."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import UserError
from base.reading import read_regular
from ckpt_tools.hf.measurable import check_measurable
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import is_local

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

CONFIG = "config.json"


def check_ends(place: str, revisions: Iterable[Revision]) -> None:
    """Raise UserError where the first or last revision of a stage could not be measured."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in revisions:
        lines.setdefault((each.repo, each.line), []).append(each.revision)
    ends = [name for names in lines.values() for name in (names[0], names[-1])]
    check_revisions(place, list(dict.fromkeys(ends)))


def check_revisions(place: str, names: Sequence[str]) -> None:
    """Raise UserError for a revision of the hub or a directory that could not be measured.

    No weights are read.
    """
    if is_local(place):
        for name in names:
            directory = Path(place) / name
            check_files(place, name, (path.name for path in directory.glob("*")))
            check_measurable(read_regular(directory / CONFIG), f"{place} at {name}")
        return
    from ckpt_tools.released.hub import hub

    with hub(place) as api:
        plans = {name: api.model_info(place, revision=name, files_metadata=True) for name in names}
        check_plans(api, place, plans)


def check_plans(api: "HfApi", repo: str, plans: "Mapping[str, ModelInfo]") -> None:
    """Raise UserError for a revision of the hub that could not be measured.

    Of revisions with the same config.json, which is known by its hash, it is fetched once.
    """
    by_hash = {}
    for name, plan in plans.items():
        files = {file.rfilename: file for file in plan.siblings or []}
        check_files(repo, name, files)
        by_hash[files[CONFIG].blob_id] = name
    for name in by_hash.values():
        with tempfile.TemporaryDirectory() as directory:
            path = api.hf_hub_download(repo, CONFIG, revision=plans[name].sha, local_dir=directory)
            check_measurable(read_regular(Path(path)), f"{repo} at {name}")


def check_files(source: str, revision: str, names: Iterable[str]) -> None:
    """Raise UserError unless a revision has a configuration, and weights that are no pickles."""
    files = {name for name in names if "/" not in name}
    if CONFIG not in files:
        raise UserError(f"{source} has no {CONFIG} at {revision}; leave it out")
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(
            f"{source} has no safetensors at {revision}; leave it out, pickled weights are not"
            " opened"
        )
