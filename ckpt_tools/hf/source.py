"""Source of an import, a local HF directory or the hub, and its model in the terms of a run."""

import re
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from transformers import AutoConfig, PretrainedConfig

from base.errors import UserError, explain_validation
from base.files import FileRecord
from ckpt_tools.formats.weight_files import INDEX_JSON
from ckpt_tools.hf.directory import CONFIGURATION_FILES, TOKENIZER_FILES, read_lineage
from ckpt_tools.hf.forward import read_config
from ckpt_tools.hf.quiet import quiet_transformers
from ckpt_tools.released.download_record import read_download
from ckpt_tools.released.hub import hub
from ckpt_tools.released.registry import parse_revision
from train.model.config import ModelConfig
from train.model.families import hf_settings

ARCHITECTURES = {
    "olmo2": "Olmo2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}
HUB_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>\w[\w./-]*)", re.ASCII)
# Fields of a configuration that change no logit: how it was written, special tokens, training,
# heads that are not used.
WITHOUT_EFFECT = {
    *("architectures", "dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("initializer_range", "classifier_dropout", "max_position_embeddings"),
}


class Source(NamedTuple):
    """An HF directory on this machine, and its origin as far as it is known."""

    path: Path
    repository: str | None  # of the hub
    revision: str | None
    files: dict[str, FileRecord]  # what lineage.json or download.json vouches for
    step: int | None
    tokens: int | None


def find_source(source: str) -> Source:
    """Find the HF directory `source`, or fetch OWNER/NAME@REVISION into huggingface_hub's cache.

    Step and tokens are those of lineage.json, or of the revision's name.

    Raises:
        UserError: `source` is neither, or the hub is not reached or has no such revision.
    """
    path = Path(source)
    if path.is_dir():
        lineage, files = read_lineage(path) or ({}, {})
        record = read_download(path)
        if lineage or record is None:
            return Source(path, None, None, files, lineage.get("step"), lineage.get("tokens"))
        position = _position(record.repo, record.revision)
        return Source(path, record.repo, record.revision, record.files, *position)
    match = HUB_SOURCE.fullmatch(source)
    if not match:
        raise UserError(
            f"{source} is not a directory; give an HF directory, or a model of the hub as"
            " OWNER/NAME@REVISION"
        )
    repository, revision = match["repository"], match["revision"]
    patterns = ["*.safetensors", INDEX_JSON, *CONFIGURATION_FILES, *TOKENIZER_FILES]
    with hub(repository) as api:
        configuration = list(CONFIGURATION_FILES)
        read_model(
            Path(api.snapshot_download(repository, revision=revision, allow_patterns=configuration))
        )  # what cannot be imported is refused before the weights
        path = Path(api.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    return Source(path, repository, revision, {}, *_position(repository, revision))


def _position(repository: str, revision: str) -> tuple[int | None, int | None]:
    """Return step and tokens of a revision of a known trajectory; None for what is not known."""
    try:
        parsed = parse_revision(repository, revision)
    except UserError:  # another model, or a name of its own
        return None, None
    return parsed.step, parsed.tokens


def read_model(directory: Path) -> tuple[ModelConfig, PretrainedConfig]:
    """Return the architecture that config.json describes, and it as transformers understands it.

    Fields that decide the computation must equal those that transformers derives from a run's
    configuration: so a field that runs do not know is refused by its name, now and in later
    versions of transformers.

    Raises:
        UserError: another architecture, or a field that runs do not know or know with another
            value.
    """
    quiet_transformers()
    config, path = read_config(directory), directory / "config.json"
    if config.architectures != [ARCHITECTURES.get(config.model_type)]:
        names = ", ".join(config.architectures or ["no architecture"])
        raise UserError(f"{path} is of {names}; give one of {', '.join(ARCHITECTURES.values())}")

    # The run's configuration of the same architecture.
    fields = config.to_dict()
    if config.model_type == "gpt_neox":
        fields.pop("num_key_value_heads", None)  # transformers' GPT-NeoX has no such setting
    rope = fields.get("rope_parameters") or {}
    sizes = {key: fields[key] for key in ModelConfig.model_fields.keys() & fields.keys()}
    settings = {
        "family": config.model_type,
        "num_key_value_heads": config.num_attention_heads,  # if the family has no other
        "rope_theta": rope.get("rope_theta"),
        "rotary_fraction": rope.get("partial_rotary_factor", 1.0),
        "norm_eps": fields.get("rms_norm_eps", fields.get("layer_norm_eps")),
        "initializer": "truncated_normal" if config.model_type == "olmo2" else "normal",
    }
    try:
        model = ModelConfig.model_validate(settings | sizes)
    except ValidationError as error:
        raise explain_validation(str(path), error) from None

    # That configuration in transformers' form must have the same fields as the file.
    expected = AutoConfig.for_model(
        model.family, **hf_settings(model, config.max_position_embeddings, 0)
    ).to_dict()
    # Not every family's configuration has it, but attention depends on it.
    head_dim = {"head_dim": model.head_dim}
    fields, expected = head_dim | fields, head_dim | expected
    for key in sorted((fields.keys() | expected.keys()) - WITHOUT_EFFECT):
        if fields.get(key) != expected.get(key):
            raise UserError(
                f"{path}: {key} is {fields.get(key)!r}, runs of this family are trained with"
                f" {expected.get(key)!r}; such models cannot be imported"
            )
    return model, config
