"""Import of an HF model as a checkpoint that runs start from: its weights, bit for bit."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from base.errors import UserError, explain_validation
from base.files import (
    FileRecord,
    committed_directory,
    fsync_path,
    record_file,
    sha256_of,
    write_sealed,
)
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.formats.parallel import hash_in_parallel, is_whole, verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.formats.weights import DTYPES, dtype_of
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import (
    CONFIGURATION_FILES,
    TOKENIZER_FILES,
    copy_files,
    read_download,
    read_lineage,
)
from ckpt_tools.hf.forward import check_shapes, empty_model, quiet_transformers, spread_ids
from ckpt_tools.probe import compute_probe
from ckpt_tools.released.before import check_files
from ckpt_tools.released.hub import hub
from ckpt_tools.released.revisions import parse_revision
from train.model.config import Llama3Scaling, ModelConfig, hf_settings, parameter_shapes
from train.model.families import FAMILIES, TRAINED_ARCHITECTURES
from train.run.directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    MODEL_INDEX,
    PROBE,
    PROBE_SEQUENCES,
    PROBE_TOKENS,
    CheckpointRecord,
    read_checkpoint_record,
)

IMPORTED = "imported"  # in the place of a run's name and fingerprint
HUB_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>\w[\w./-]*)", re.ASCII)
# Fields of a configuration that change no logit: how it was written, special tokens, training,
# heads that are not used, what decides only other fields that are compared.
WITHOUT_EFFECT = {
    *("architectures", "dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    *("initializer_range", "classifier_dropout", "max_position_embeddings"),
    *("pretraining_tp", "is_llama_config", "max_window_layers", "no_rope_layer_interval"),
}


def import_checkpoint(source: str, out: Path) -> None:
    """Write a checkpoint from an HF model, and print the `start_from` of a run that begins with it.

    It holds the weights by HF name, which both engines start from at any layout; the probe, which
    transformers computes in fp32 from the source; configuration and tokenizer of the source
    unchanged; and in checkpoint.json the hashes of all its sources, with the step and tokens of a
    lineage or of the revision's name, else 0.

    If `out` already is this import, nothing is done.

    Raises:
        UserError: the source is damaged, or of an architecture, configuration or type that runs do
            not know; or `out` is something else.
    """
    origin = find_source(source)
    verify_in_parallel(origin.path, origin.files, f"restore {origin.path}, or make it again")
    model, config = read_trainable(origin.path)
    weights = HFWeights(origin.path)
    check_shapes(empty_model(config), weights, origin.path)
    weights.tensors = {name: weights.tensors[name] for name in parameter_shapes(model)}

    record = _record(origin, model, weights)
    if not _is_there(out, record):
        length = min(PROBE_TOKENS, config.max_position_embeddings)
        input_ids_BS = spread_ids(model.vocab_size, PROBE_SEQUENCES, length)
        _write(out, origin.path, record, weights, input_ids_BS)

    start_from = {"checkpoint": str(out.resolve()), "sha256": sha256_of(out / CHECKPOINT_JSON)}
    print(
        f"{out}: as of step {record.step}, {record.tokens} tokens; to start a run from it, add to"
        " its run.json"
    )
    print(f'"start_from": {json.dumps(start_from)}')


class ImportSource(NamedTuple):
    """An HF directory on this machine, and its origin as far as it is known."""

    path: Path
    repository: str | None  # of the hub
    revision: str | None
    files: dict[str, FileRecord]  # what lineage.json or download.json vouches for
    step: int | None
    tokens: int | None


def find_source(source: str) -> ImportSource:
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
            return ImportSource(path, None, None, files, lineage.get("step"), lineage.get("tokens"))
        position = _position(record.repo, record.revision)
        return ImportSource(path, record.repo, record.revision, record.files, *position)
    match = HUB_SOURCE.fullmatch(source)
    if not match:
        raise UserError(
            f"{source} is not a directory; give an HF directory, or a model of the hub as"
            " OWNER/NAME@REVISION"
        )
    repository, revision = match["repository"], match["revision"]
    # No pickles and no code are fetched.
    patterns = ["*.safetensors", MODEL_INDEX, *CONFIGURATION_FILES, *TOKENIZER_FILES]
    with hub(repository) as api:
        # What cannot be imported is refused before the weights: by the names of files, and then by
        # config.json.
        plan = api.model_info(repository, revision=revision)
        if check_files(repository, revision, [file.rfilename for file in plan.siblings or []]):
            raise UserError(
                f"{repository} has no safetensors at {revision}; fetch it with 'python -m"
                " ckpt_tools download', which converts its pickles, and import that directory"
            )
        fetch = partial(api.snapshot_download, repository, revision=plan.sha)
        read_trainable(Path(fetch(allow_patterns=list(CONFIGURATION_FILES))))
        path = Path(fetch(allow_patterns=patterns))
    return ImportSource(path, repository, revision, {}, *_position(repository, revision))


def _position(repository: str, revision: str) -> tuple[int | None, int | None]:
    """Return step and tokens of a revision of a known trajectory; None for what is not known."""
    try:
        parsed = parse_revision(repository, revision)
    except UserError:  # another model, or a name of its own
        return None, None
    return parsed.step, parsed.tokens


def read_trainable(directory: Path) -> tuple[ModelConfig, PretrainedConfig]:
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
    family = FAMILIES.get(config.model_type)
    training = family.training if family else None
    if family is None or training is None or config.architectures != [family.architecture]:
        names = ", ".join(config.architectures or ["no architecture"])
        raise UserError(f"{path} is of {names}; give one of {', '.join(TRAINED_ARCHITECTURES)}")

    # The run's configuration of the same architecture.
    fields = config.to_dict()
    if not training.grouped_queries:
        fields.pop("num_key_value_heads", None)  # then transformers has no such setting
    rope = fields.get("rope_parameters") or {}
    # Settings that both sides have under one name, such as hidden_size.
    sizes = {key: fields[key] for key in ModelConfig.model_fields.keys() & fields.keys()}
    settings = {
        "family": config.model_type,
        "num_key_value_heads": config.num_attention_heads,  # if the family has no other
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": _scaling(rope),
        "rotary_fraction": rope.get("partial_rotary_factor", 1.0),
        "initializer": training.initializer,
    }
    eps = training.norm_eps
    settings["norm_eps"] = eps if isinstance(eps, float) else fields.get(eps)
    # A run states a width of heads only where it does not follow.
    if sizes.get("head_dim") == config.hidden_size // config.num_attention_heads:
        del sizes["head_dim"]
    try:
        model = ModelConfig.model_validate(settings | sizes)
    except ValidationError as error:
        raise explain_validation(str(path), error) from None

    # That configuration in transformers' form must have the same fields as the file; the 0,
    # a token that ends texts, is not compared.
    expected = AutoConfig.for_model(
        model.family, **hf_settings(model, config.max_position_embeddings, 0)
    ).to_dict()
    # Not every family's configuration has it, but attention depends on it.
    head_dim = {"head_dim": model.head_size}
    fields, expected = head_dim | fields, head_dim | expected
    for key in sorted((fields.keys() | expected.keys()) - WITHOUT_EFFECT):
        # A switch that transformers does not know, and that is off, changes nothing.
        is_off = key not in expected and fields[key] is False
        if fields.get(key) != expected.get(key) and not is_off:
            raise UserError(
                f"{path}: {key} is {fields.get(key)!r}, runs of this family are trained with"
                f" {expected.get(key)!r}; such models cannot be imported"
            )
    return model, config


def _scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of a rotary embedding, if it is Llama 3's; others are compared."""
    if rope.get("rope_type") != "llama3":
        return None
    return {key: rope[key] for key in Llama3Scaling.model_fields if key in rope}


def _record(origin: ImportSource, model: ModelConfig, weights: HFWeights) -> CheckpointRecord:
    """Return checkpoint.json of an import, without the files that are still to be written."""
    files = [path.name for path in weight_files(origin.path)]
    tokenizer = [name for name in TOKENIZER_FILES if (origin.path / name).is_file()]
    hashes = hash_in_parallel(origin.path, [*files, *tokenizer], origin.files)
    return CheckpointRecord(
        run=IMPORTED,
        fingerprint=IMPORTED,
        step=origin.step or 0,
        tokens=origin.tokens or 0,
        learning_rate=0.0,
        train_loss=None,
        held_out_loss=None,
        engine="either",
        precision=dtype_of(weights, tuple(DTYPES), origin.path),
        world_size=1,
        layout={"tensor": 1, "pipeline": 1, "data": 1},
        attempt=0,
        data_sha256={},
        model=model.model_dump(mode="json"),
        imported={
            "source": origin.repository or str(origin.path.resolve()),
            "revision": origin.revision,
            "weights_digests": {name: hashes[name].digest for name in files},
            "tokenizer_digests": {name: hashes[name].digest for name in tokenizer},
            "optimizer_state": False,
        },
        files={},
    )


def _write(
    out: Path, source: Path, record: CheckpointRecord, weights: HFWeights, input_ids_BS: Tensor
) -> None:
    """Write the checkpoint; checkpoint.json, which makes it complete, comes last."""
    with committed_directory(out) as aside:
        files = write_weights(aside, weights)
        # Shards come unsynced; checkpoint.json must not vouch for what a power loss takes.
        for name in files:
            fsync_path(aside / name)

        (aside / IMPORTED_FROM).mkdir()
        names = (*CONFIGURATION_FILES, *TOKENIZER_FILES)
        copied = copy_files(source, aside / IMPORTED_FROM, names)

        probe = {"input_ids": input_ids_BS, **compute_probe(source, input_ids_BS)}
        save_file({key: tensor.contiguous() for key, tensor in probe.items()}, aside / PROBE)

        for name in (PROBE, *(f"{IMPORTED_FROM}/{name}" for name in copied)):
            files[name] = record_file(aside / name)
        complete = record.model_copy(update={"files": dict(sorted(files.items()))})
        write_sealed(aside / CHECKPOINT_JSON, complete.model_dump(mode="json"))


def _is_there(out: Path, record: CheckpointRecord) -> bool:
    """Return whether `out` is this import and undamaged; UserError if it is something else."""
    if not out.exists():
        return False
    if (out / CHECKPOINT_JSON).is_file():
        present = read_checkpoint_record(out)
        # `record` has no files yet; all else has to be equal.
        if present.model_copy(update={"files": {}}) == record:
            return is_whole(out, present.files)
    raise UserError(f"{out} exists and is not this import; give a new directory")
