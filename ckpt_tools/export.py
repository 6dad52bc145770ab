"""Export of a training checkpoint to HF, refused unless the HF model reproduces the checkpoint's own logits."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from ckpt_tools import deepspeed_weights, megatron_shards
from ckpt_tools.hf_directory import LINEAGE_JSON
from ckpt_tools.hf_model import EXPORTED_ARCHITECTURES, load_hf_model, quiet_transformers, read_lineage
from train.command import UserError
from train.config import RunConfig, load_run
from train.families import hf_settings
from train.frozen import fingerprint
from train.run_directory import (
    CHECKPOINT_JSON,
    PROBE,
    CheckpointRecord,
    RunDirectory,
    committed_directory,
    first_damage,
    record_files,
    sha256_of,
    verify_checkpoint,
    write_json,
)
from train.tokenizer import load_tokenizer
from train.tracking import environment

# Largest allowed |difference| of a logit over the largest |logit| (or 1). fp32: the same arithmetic in another order.
# bf16: the engine rounds every activation to 8 bits of mantissa, HF in fp32 from the same weights does not.
PARITY_TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
# What the lineage of an export tells of its checkpoint.
TOLD = (
    *("run", "fingerprint", "step", "tokens", "learning_rate", "train_loss", "held_out_loss", "average"),
    *("engine", "precision", "world_size", "layout", "data_sha256"),
)
# What transformers calls in memory otherwise than in files, where names stay as they were released.
NAMES_IN_MEMORY = {"embed_out.weight": "lm_head.weight"}
# What makes up a tokenizer; its directory may be a whole HF model's.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)


def hf_config(run: RunConfig, eos_token_id: int) -> PretrainedConfig:
    """The transformers configuration of a run's model."""
    return AutoConfig.for_model(run.model.family, **hf_settings(run.model, run.data.sequence_length, eos_token_id))


def _write_model(directory: Path, config: PretrainedConfig, weights: dict[str, Tensor]) -> None:
    quiet_transformers()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {NAMES_IN_MEMORY.get(name, name): weight.contiguous() for name, weight in weights.items()}
    expected = {name for name, _ in model.named_parameters()}
    if expected != weights.keys():
        raise UserError(
            f"HF and the checkpoint differ in {sorted(expected ^ weights.keys())[:3]}; nothing was exported"
        )
    model.load_state_dict(weights, strict=True, assign=True)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, bos_token_id=None, pad_token_id=None)
    config.dtype = next(iter(weights.values())).dtype
    try:
        model.save_pretrained(directory, max_shard_size="5GB")
    except SafetensorError as error:  # a full disk, in safetensors' words
        raise UserError(f"could not write {directory}: {error}; free space there and export again") from None


@torch.no_grad()
def check_parity(hf_dir: Path, checkpoint: Path, precision: str) -> dict[str, float]:
    """Compares the HF directory's logits with those the training engine left in the checkpoint.

    Both sides see the same tokens; HF computes in fp32 on the CPU from the exported weights.

    Returns:
        max_absolute_error and max_logit of the probe, and the tolerance on their ratio.

    Raises:
        UserError: the ratio max_absolute_error / max(1, max_logit) is above the tolerance.
    """
    try:
        probe = load_file(checkpoint / PROBE)
    except SafetensorError as error:
        raise UserError(f"{checkpoint / PROBE} is damaged ({error}); give another checkpoint") from None
    model = load_hf_model(hf_dir, torch.float32, "sdpa", EXPORTED_ARCHITECTURES)
    logits = model(probe["input_ids"]).logits
    difference = (logits - probe["logits"]).abs().max().item()
    largest, tolerance = probe["logits"].abs().max().item(), PARITY_TOLERANCE[precision]
    if not difference <= tolerance * max(1.0, largest):
        raise UserError(
            f"{checkpoint}: HF logits differ by {difference:.3g} from the training engine's (largest {largest:.3g}, "
            f"allowed ratio {tolerance:g}); nothing was exported: report it, these weights do not convert"
        )
    return {"max_absolute_error": difference, "max_logit": largest, "tolerance": tolerance}


def _current_parity(out: Path, checkpoint_sha256: str) -> dict[str, float] | None:
    """The parity figures of `out` if it already is the whole, unchanged export of this checkpoint.

    Raises:
        UserError: something else is there, which an export must not replace.
    """
    if not out.exists():
        return None
    found = read_lineage(out)
    if found is None or found[0].get("kind") != "export":
        raise UserError(f"{out} exists and is no export; give a new directory or remove it")
    lineage, files = found
    current = lineage["checkpoint_sha256"] == checkpoint_sha256 and first_damage(out, files) is None
    return dict(lineage["parity"]) if current else None


def _lineage(checkpoint: Path, record: CheckpointRecord) -> dict[str, Any]:
    return {
        "kind": "export",
        "checkpoint": str(checkpoint.resolve()),
        "checkpoint_sha256": sha256_of(checkpoint / CHECKPOINT_JSON),
        **record.model_dump(mode="json", include=set(TOLD)),
    }


def read_weights(checkpoint: Path, run: RunConfig) -> dict[str, Tensor]:
    """Every HF tensor of a hash-checked checkpoint of either engine, as it was trained, dtype included."""
    if run.engine == "deepspeed":
        return deepspeed_weights.read_hf_weights(checkpoint, run)
    return megatron_shards.read_hf_weights(checkpoint, run.model)


def export(checkpoint: Path, out: Path) -> dict[str, float]:
    """Writes an HF directory of the run's family: weights as trained, configs, tokenizer, lineage.json last.

    The lineage of an average (`RUN/checkpoints/lawa5x500-stepXXXXXXXX`) lists, under "average", what it is made from.

    Args:
        checkpoint: RUN/checkpoints/stepXXXXXXXX; its files are hash-checked before any is opened.
        out: the directory to write, whole or not at all; an export of another checkpoint there is replaced.

    Returns:
        The parity figures of `check_parity`.
    """
    record = verify_checkpoint(checkpoint)
    directory = RunDirectory(checkpoint.resolve().parent.parent)
    run = load_run(directory.run_json)
    if fingerprint(run) != record.fingerprint:
        raise UserError(f"{checkpoint} is not of the run in {directory.run_json}; export it beside its own run.json")
    if record.precision not in PARITY_TOLERANCE:
        raise UserError(
            f"{checkpoint} was trained in {record.precision}, for which no tolerance between the engine's logits and "
            f"HF's is known; export checkpoints trained in {' or '.join(PARITY_TOLERANCE)}"
        )
    lineage = _lineage(checkpoint, record)
    current = _current_parity(out, lineage["checkpoint_sha256"])
    if current:
        return current
    tokenizer_dir = directory.resolve(run.data.tokenizer)
    _, eos_token_id = load_tokenizer(tokenizer_dir)
    weights = read_weights(checkpoint, run)
    with committed_directory(out) as aside:
        _write_model(aside, hf_config(run, eos_token_id), weights)
        for name in TOKENIZER_FILES:
            if (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, aside / name)
        parity = check_parity(aside, checkpoint, record.precision)
        files = {name: file.model_dump() for name, file in record_files(aside).items()}
        write_json(aside / LINEAGE_JSON, {**lineage, "parity": parity, "files": files, "environment": environment()})
    return parity
