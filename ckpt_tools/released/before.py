"""Revisions that cannot be measured, told by their files' names and config.json alone."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import UserError
from base.files import sha256_of
from base.reading import parse_json, read_regular
from ckpt_tools.formats.weight_files import pickles_of
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import is_local
from train.data.tokenizer import TOKENIZER_JSON
from train.model.families import FAMILIES, family_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo
    from transformers import PretrainedConfig

CONFIG = "config.json"


def check_ends(source: str, revisions: Iterable[Revision]) -> dict[str, str]:
    """Return config.json of the first and last revision of each stage, by revision.

    UserError where one of them could not be measured.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for each in revisions:
        lines.setdefault((each.repo, each.line), []).append(each.revision)
    ends = [name for names in lines.values() for name in (names[0], names[-1])]
    return check_revisions(source, list(dict.fromkeys(ends)))


def check_revisions(source: str, names: Sequence[str]) -> dict[str, str]:
    """Return config.json of revisions of the hub or a directory, by revision.

    UserError for one that could not be measured. No weights are read.
    """
    if is_local(source):
        configs = {}
        for name in names:
            directory = Path(source) / name
            check_files(source, name, (path.name for path in directory.glob("*")))
            content = read_regular(directory / CONFIG)
            check_measurable(content, f"{source} at {name}")
            configs[name] = content.decode()
        return configs
    from ckpt_tools.released.hub import hub

    with hub(source) as api:
        plans = {name: api.model_info(source, revision=name, files_metadata=True) for name in names}
        return check_plans(api, source, plans)


def tokenizer_sha256(source: str, revision: str) -> str | None:
    """Return the hash of a revision's tokenizer.json; None where it has none.

    On the hub large files have their hash stated, others are fetched.
    """
    if is_local(source):
        path = Path(source) / revision / TOKENIZER_JSON
        return sha256_of(path) if path.is_file() else None
    from ckpt_tools.released.hub import hub

    with hub(source) as api, tempfile.TemporaryDirectory() as directory:
        plan = api.model_info(source, revision=revision, files_metadata=True)
        files = {file.rfilename: file for file in plan.siblings or []}
        if TOKENIZER_JSON not in files:
            return None
        lfs = files[TOKENIZER_JSON].lfs
        if lfs:
            return str(lfs.sha256)
        path = Path(
            api.hf_hub_download(source, TOKENIZER_JSON, revision=plan.sha, local_dir=directory)
        )
        return sha256_of(path)


def check_plans(api: "HfApi", repo: str, plans: "Mapping[str, ModelInfo]") -> dict[str, str]:
    """Return config.json of revisions of the hub, by revision.

    Of revisions with the same one, which is known by its hash, it is fetched once. UserError for a
    revision that could not be measured.
    """
    hashes = {}
    for name, plan in plans.items():
        files = {file.rfilename: file for file in plan.siblings or []}
        check_files(repo, name, files)
        hashes[name] = files[CONFIG].blob_id
    contents = {}
    for name, digest in hashes.items():
        if digest in contents:
            continue
        with tempfile.TemporaryDirectory() as directory:
            # By its commit, so that a branch that moves meanwhile changes nothing.
            path = api.hf_hub_download(repo, CONFIG, revision=plans[name].sha, local_dir=directory)
            content = read_regular(Path(path))
        check_measurable(content, f"{repo} at {name}")
        contents[digest] = content.decode()
    return {name: contents[digest] for name, digest in hashes.items()}


def check_files(source: str, revision: str, names: Iterable[str]) -> list[str]:
    """Return the pickles that are to be converted, none where there are safetensors.

    UserError unless a revision has a configuration, and weights of one of these formats.
    """
    files = {name for name in names if "/" not in name}
    if CONFIG not in files:
        raise UserError(f"{source} has no {CONFIG} at {revision}; leave it out")
    pickles = pickles_of(f"{source} at {revision}", files)
    if not pickles and not any(name.endswith(".safetensors") for name in files):
        raise UserError(
            f"{source} has no safetensors at {revision}, nor pytorch_model.bin, which could be"
            " converted; leave it out: other pickles are not opened"
        )
    return pickles


def pickled_revisions(source: str, names: Iterable[str]) -> list[str]:
    """Return those of the revisions whose weights are pickles, which a download converts."""
    if is_local(source):
        files = {name: [path.name for path in (Path(source) / name).glob("*")] for name in names}
        return [name for name, present in files.items() if pickles_of(source, present)]
    from ckpt_tools.released.hub import hub

    with hub(source) as api:
        plans = {name: api.model_info(source, revision=name) for name in names}
    files = {name: [file.rfilename for file in plan.siblings or []] for name, plan in plans.items()}
    return [name for name, present in files.items() if pickles_of(source, present)]


def check_measurable(content: bytes, source: str) -> None:
    """Raise UserError unless a model with this config.json can be quantized and measured.

    Code beside a model is never run: a model type without a row in the table is refused.
    """
    fields = parse_json(content, f"config.json of {source}", "give another model")
    if not isinstance(fields, dict):
        raise UserError(f"config.json of {source} is not a JSON object; give another model")
    kind, classes = fields.get("model_type"), fields.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else classes
    known = f"give a model of {', '.join(FAMILIES)}"
    if not isinstance(kind, str) or kind not in FAMILIES:
        code = ", code of its own that is never run" if "auto_map" in fields else ""
        raise UserError(f"{source} cannot be measured: its type is {kind!r}{code}; {known}")
    if named not in FAMILIES[kind].architectures:
        raise UserError(f"{source} cannot be measured: it is a {named}; {known}")
    try:
        family_of(_config(fields))
    except UserError as error:
        raise UserError(f"{source} cannot be measured: {error}") from None


def _config(fields: dict[str, Any]) -> "PretrainedConfig":
    from huggingface_hub.errors import StrictDataclassError

    from ckpt_tools.hf.configuration import check_depth, check_understood, configuration

    check_depth("config.json", fields)
    settings = {key: value for key, value in fields.items() if key != "model_type"}
    try:
        config = configuration(fields["model_type"], **settings)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"config.json: {' '.join(str(error).split())[:200]}; give another model"
        ) from None
    check_understood("config.json", config, fields)
    return config
