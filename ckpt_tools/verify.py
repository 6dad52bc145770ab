"""Whether an HF directory holds what was trained: its files, its tensors, and what every module makes of a probe.

The probe was computed by the training engine (`Engine.probe` in train/engine.py); transformers computes it here once
more, in fp32 from the files. The first module that answers otherwise to the same input names the wrong parameter.

Shapes: B sequences, S tokens, V vocabulary, H hidden size, W width of a module's output.
"""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from ckpt_tools.formats.hf_weights import HFWeights, weight_files
from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel
from ckpt_tools.forward import empty_model, names_in_files, read_config, spread_ids, stream_logits
from ckpt_tools.hf_directory import LINEAGE_JSON, VERIFICATION_PROBE, read_lineage
from train.command import UserError
from train.run_directory import PROBE_OUTPUTS, PROBE_SEQUENCES, PROBE_TOKENS, FileRecord, write_json

# Largest allowed |difference| of an output over the largest |value| of that output, behind the first layer. What the
# layers round adds up like a random walk: behind layer n it is sqrt(n) times as much. Measured at 2 to 64 layers and
# widths of 32 to 1024 are up to 1e-6 in fp32, which is the same arithmetic in another order, and 1.4e-2 in bf16, where
# the engine rounds every activation to 8 bits of mantissa and transformers in fp32 does not.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
ATTENTION = (".self_attn.o_proj", ".attention.dense")  # what attention returns, in all families
# A layer's modules as data passes through them, in all families. What stands together does not feed each other.
STAGES = (
    ("input_layernorm",),
    ("q_proj", "k_proj", "v_proj", "query_key_value"),
    ("q_norm", "k_norm"),
    ("o_proj", "dense"),
    ("post_attention_layernorm",),
    ("gate_proj", "up_proj", "dense_h_to_4h"),
    ("down_proj", "dense_4h_to_h"),
    ("post_feedforward_layernorm",),
)
CHUNK_BYTES = 64 << 20  # of a tensor in memory at once
MOST_PROBLEMS = 5  # named in one line
AGAIN = {"export": "export the checkpoint again", "average": "make the average again"}  # by kind of lineage


def _parameters_of(model: Any) -> dict[str, list[str]]:
    """The keys of a probe's outputs, each with the parameters in the files that the module itself holds.

    A layer stands for the residual stream behind it and holds none.
    """
    files, layers, lm_head = names_in_files(model), set(model.base_model.layers), model.get_output_embeddings()
    return {
        "logits" if module is lm_head else PROBE_OUTPUTS + name: [files[f"{name}.{key}"] for key in own]
        for name, module in model.named_modules()
        if (own := [key for key, _ in module.named_parameters(recurse=False)]) or module in layers
    }


def compute_probe(hf_dir: Path, input_ids_BS: Tensor) -> dict[str, Tensor]:
    """What `Engine.probe` returns for these tokens, by transformers, in fp32 on the CPU from the weights in the files.

    Raises:
        UserError: the weights are not those of config.json, or cannot be read.
    """
    model = empty_model(read_config(hf_dir))
    keys, embedding = _parameters_of(model).keys(), model.get_input_embeddings()
    outputs: dict[str, Tensor] = {}

    def observe(name: str, output_BSW: Tensor) -> None:
        if PROBE_OUTPUTS + name in keys:
            every_token = model.get_submodule(name) is embedding
            outputs[PROBE_OUTPUTS + name] = output_BSW if every_token else output_BSW[:, -1].clone()

    return {"logits": stream_logits(hf_dir, input_ids_BS, observe), **outputs}


def check_probe(hf_dir: Path, probe: dict[str, Tensor], precision: str) -> dict[str, Any]:
    """Compares what transformers makes of the probe's tokens with what the training engine made of them.

    Args:
        hf_dir: an HF directory, complete but perhaps for its lineage.
        probe: "input_ids" [B, S] and what `Engine.probe` returned for them.
        precision: of the engine's arithmetic or of the conversion, whichever is coarser; a key of `TOLERANCE`.

    Returns:
        max_absolute_error and max_logit of the logits; precision, and the tolerance it allows behind the last layer;
        and at each of the levels attention, layer and logits the largest |difference| over the largest |value| of the
        same output.

    Raises:
        UserError: the tolerance is exceeded; names the parameters whose modules first deviate, though their inputs
            agree. Or the probe is not of this model.
    """
    parameters = _parameters_of(empty_model(read_config(hf_dir)))
    unmatched = sorted(probe.keys() ^ {"input_ids", *parameters})
    if unmatched:
        raise UserError(f"the probe and config.json are not of the same model, see '{unmatched[0]}'")
    found = compute_probe(hf_dir, probe["input_ids"])
    errors = {key: _relative_error(key, found[key], probe[key]) for key in parameters}
    levels = {
        "attention": max(error for key, error in errors.items() if key.endswith(ATTENTION)),
        "layer": max(errors[key] for key, held in parameters.items() if not held),
        "logits": errors["logits"],
    }
    num_layers = sum(not held for held in parameters.values())
    allowed = {key: TOLERANCE[precision] * math.sqrt(min(max(_stage(key)[0] + 1, 1), num_layers)) for key in errors}
    deviating = [key for key in errors if errors[key] > allowed[key]]
    if deviating:
        first = min(_stage(key) for key in deviating)
        wrong = [key for key in deviating if _stage(key) == first]
        names = [name for key in wrong for name in parameters[key] or [f"the sum in {key[len(PROBE_OUTPUTS) :]}"]]
        hint = " (or heads and rope in config.json)" * any(key.endswith(ATTENTION) for key in wrong)
        shown = ", ".join(f"{level} {largest:.2g}" for level, largest in levels.items())
        raise UserError(
            f"not what was trained: {', '.join(names)}{hint}; from the same inputs as in training come outputs off by "
            f"{max(errors[key] for key in wrong):.2g} of the largest value (allowed {allowed[wrong[0]]:.2g}; {shown})"
        )
    return {
        "max_absolute_error": (found["logits"] - probe["logits"]).abs().max().item(),
        "max_logit": probe["logits"].abs().max().item(),
        "precision": precision,
        "tolerance": allowed["logits"],
        **levels,
    }


def _relative_error(key: str, found: Tensor, expected: Tensor) -> float:
    """Largest |difference| over the largest |value|; infinite where something is not finite."""
    if found.shape != expected.shape:
        raise UserError(f"the probe's '{key}' is {tuple(expected.shape)}, config.json makes it {tuple(found.shape)}")
    largest = max(expected.abs().max().item(), torch.finfo(torch.float32).tiny)
    error = (found - expected).abs().max().item() / largest
    return error if math.isfinite(error) else math.inf


def _stage(key: str) -> tuple[float, float]:
    """Where data passes a module: layer, and stage within it."""
    if key == "logits":
        return math.inf, 1
    found = re.search(r"\.layers\.(\d+)(?:\.(?:\w+\.)*(\w+))?$", key)
    if not found:  # the embedding, or the final norm
        return (-1, 0) if ".embed_" in key else (math.inf, 0)
    layer, name = int(found[1]), found[2]
    return layer, next((index for index, names in enumerate(STAGES) if name in names), len(STAGES))


def check_tensors(weights: HFWeights, config: PretrainedConfig) -> dict[str, Any]:
    """Compares the tensors of the files with config.json, and looks for values that are not finite.

    Returns:
        How many tensors and parameters there are, and their dtype.

    Raises:
        UserError: names the tensors that are missing, renamed, unknown, misshapen, of another type or not finite.
    """
    dtype = config.dtype or next(iter(weights.tensors.values())).dtype
    model = empty_model(config)  # which changes the dtype in its configuration
    held = model.state_dict()
    shapes = {file: tuple(held[name].shape) or (1,) for name, file in names_in_files(model).items()}
    problems = list(_wrong_names(weights, shapes))
    for name in shapes.keys() & weights.tensors.keys():
        found = weights.tensors[name]
        if found.shape != shapes[name]:
            problems.append(f"'{name}' is {found.shape}, config.json makes it {shapes[name]}")
        if found.dtype != dtype:
            problems.append(f"'{name}' is {found.dtype}, config.json says {dtype}")
        if not all(rows.isfinite().all() for rows in _chunks(weights, name)):
            problems.append(f"'{name}' holds values that are not finite")
    if problems:
        more = f", and {len(problems) - MOST_PROBLEMS} more problems" * (len(problems) > MOST_PROBLEMS)
        raise UserError(", ".join(sorted(problems)[:MOST_PROBLEMS]) + more)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return {"tensors": len(shapes), "parameters": numbers, "dtype": str(dtype).removeprefix("torch.")}


def _wrong_names(weights: HFWeights, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """What is missing and what is unknown; an unknown tensor of a missing one's shape is taken for that one renamed."""
    missing = sorted(shapes.keys() - weights.tensors.keys())
    for name in sorted(weights.tensors.keys() - shapes.keys()):
        fitting = [each for each in missing if shapes[each] == weights.tensors[name].shape]
        closest = difflib.get_close_matches(name, fitting, n=1)
        if closest:
            missing.remove(closest[0])
            yield f"'{closest[0]}' is missing, perhaps renamed to '{name}'"
        else:
            yield f"'{name}' is unknown"
    yield from (f"'{name}' is missing" for name in missing)


def _chunks(weights: HFWeights, name: str) -> Iterator[Tensor]:
    tensor = weights.tensors[name]
    rows = max(1, CHUNK_BYTES // tensor.row_bytes)
    for start in range(0, tensor.shape[0], rows):
        yield weights.read(name, start, min(start + rows, tensor.shape[0]))


def _check_files(hf_dir: Path, files: dict[str, FileRecord], kind: str, again: str) -> None:
    """UserError unless every recorded file is unchanged, and everything that is read from here on is recorded."""
    damage = first_damage_in_parallel(hf_dir, files, default_processes())
    if damage:
        raise UserError(f"{damage}; {again}")
    read = ["config.json", *(path.name for path in weight_files(hf_dir)), *[VERIFICATION_PROBE] * (kind == "export")]
    for name in read:
        if name not in files:
            state = "is not in lineage.json" if (hf_dir / name).exists() else "is missing"
            raise UserError(f"{hf_dir / name} {state}; {again}")


def _check_finite(hf_dir: Path, vocab_size: int) -> dict[str, Any]:
    """Outputs of all modules for fixed tokens: the largest |logit|; UserError naming a module if one is not finite."""
    outputs = compute_probe(hf_dir, spread_ids(vocab_size, PROBE_SEQUENCES, PROBE_TOKENS))
    for key in sorted(outputs, key=_stage):
        if not outputs[key].isfinite().all():
            raise UserError(f"'{key.removeprefix(PROBE_OUTPUTS)}' overflows in a forward pass in fp32")
    return {"max_logit": outputs["logits"].abs().max().item()}


def verify(hf_dir: Path) -> dict[str, Any]:
    """Checks files against lineage.json, tensors against config.json, and outputs against the training engine's.

    A directory that is no export, such as a downloaded one or an average, has no engine's outputs to reproduce: its
    forward pass is only seen to be finite, and `verdict` says so.

    Returns:
        path, kind of lineage, number of files checked, `check_tensors`, `check_probe` as parity, and a verdict.

    Raises:
        UserError: names the first file, the tensors or the parameters that are wrong.
    """
    lineage, files = read_lineage(hf_dir) or ({}, {})
    kind = str(lineage.get("kind", "none"))
    again = AGAIN.get(kind, "fetch it again")
    if lineage:
        _check_files(hf_dir, files, kind, again)
    weights, config = HFWeights(hf_dir), read_config(hf_dir)
    try:
        report = {
            "path": str(hf_dir),
            "lineage": kind,
            "files": len(files),
            "tensors": check_tensors(weights, config),
        }
        if kind == "export":
            probe, precision = load_file(hf_dir / VERIFICATION_PROBE), lineage["parity"]["precision"]
            report["parity"] = check_probe(hf_dir, probe, precision)
            source = "the model that was imported" if lineage["imported"] else f"the {lineage['engine']} engine"
            report["verdict"] = f"computes what {source} did, at step {lineage['step']}"
        else:
            report["forward"] = _check_finite(hf_dir, config.vocab_size)
            report["verdict"] = "sound and finite; no engine's probe vouches for these weights"
    except (SafetensorError, KeyError) as error:
        raise UserError(f"{hf_dir}: {VERIFICATION_PROBE} or {LINEAGE_JSON} is damaged ({error!r}); {again}") from None
    except UserError as error:
        raise UserError(f"{hf_dir}: {error}; {again}") from None
    return report


def verify_directories(hf_dirs: list[Path], *, out: Path | None = None) -> None:
    """Prints what `verify` finds about each directory; `out` takes the reports as JSON once all are verified.

    Raises:
        UserError: a directory is wrong; of several the first, after all have been looked at.
    """
    reports, failures = [], []
    for hf_dir in hf_dirs:
        try:
            reports.append(verify(hf_dir))
            print("\n".join(_lines(reports[-1])))
        except UserError as error:
            failures.append(str(error))
            print(f"{hf_dir}\n  verdict    FAILED: {error}")
    if failures:
        raise UserError(
            failures[0] if len(hf_dirs) == 1 else f"{len(failures)} of {len(hf_dirs)} failed: {failures[0]}"
        )
    if out:
        write_json(out, reports)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    tensors, parity = report["tensors"], report.get("parity", {})
    yield report["path"]
    yield "  files      " + (f"{report['files']} as in {LINEAGE_JSON}" if report["files"] else f"no {LINEAGE_JSON}")
    yield f"  tensors    {tensors['tensors']} of {tensors['dtype']}, {tensors['parameters']:,} parameters, all finite"
    for level in ("attention", "layer", "logits") if parity else ():
        yield f"  {level:<10} off by {parity[level]:.2g} of the largest value, allowed {parity['tolerance']:.2g}"
    yield f"  verdict    {report['verdict']}"
