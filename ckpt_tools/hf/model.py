"""Opening an HF directory: checked against its lineage, of a known architecture, and named.

torch and transformers take seconds to import, so only what loads a model imports them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from base.errors import UserError
from base.reading import read_object
from ckpt_tools.formats.parallel import hash_in_parallel, verify_in_parallel
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.hf.directory import read_lineage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def read_hf_config(hf_dir: Path, architectures: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return config.json of an HF directory; UserError if it is unusable or of other models."""
    path = hf_dir / "config.json"
    try:
        config = read_object(path, "export the checkpoint again")
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; give an HF directory made by 'python -m ckpt_tools export'"
        ) from None
    names = config.get("architectures") or ["none"]
    if not (isinstance(names, list) and isinstance(names[0], str)):
        raise UserError(f"{path}: 'architectures' is no list of names; correct the value")
    architecture = names[0]
    if architectures is not None and architecture not in architectures:
        raise UserError(f"{hf_dir} holds a {architecture}; give one of {', '.join(architectures)}")
    return config


def identify(hf_dir: Path, architectures: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the identity of a model for a result: path, hashes of weight files, and lineage.

    Other files of weights in the directory, which no reader opens, have no part in it.

    Raises:
        UserError: a file that the lineage names is missing or was changed, the architecture is
            another, or the directory is an export that was not proven to compute what its training
            engine did.
    """
    read_hf_config(hf_dir, architectures)
    weights = weight_files(hf_dir)
    lineage, files = read_lineage(hf_dir) or (None, {})
    if lineage and lineage.get("kind") == "export" and not lineage.get("parity"):
        raise UserError(
            f"{hf_dir} was not proven to compute what its training engine did (lineage.json has no"
            " parity); export the checkpoint to another directory"
        )
    verify_in_parallel(hf_dir, files, "export the checkpoint again")
    records = hash_in_parallel(hf_dir, [path.name for path in weights], files)
    digests = {name: record.digest for name, record in records.items()}
    identity: dict[str, Any] = {"path": str(hf_dir), "weights_digests": digests}
    if lineage:
        identity["lineage"] = {key: value for key, value in lineage.items() if key != "environment"}
    return identity


def load_hf_model(
    hf_dir: Path,
    dtype: torch.dtype,
    attention: str = "eager",
    architectures: tuple[str, ...] | None = None,
) -> PreTrainedModel:
    """Return the causal language model of an HF directory in eval mode, every weight from it."""
    from transformers import AutoModelForCausalLM

    from ckpt_tools.formats.hf_weights import HFWeights
    from ckpt_tools.hf.configuration import read_config
    from ckpt_tools.hf.forward import check_shapes, empty_model

    read_hf_config(hf_dir, architectures)
    # By the files' headers, before a weight is loaded.
    check_shapes(empty_model(read_config(hf_dir)), HFWeights(hf_dir), hf_dir)

    # No code of the directory is run, and no pickle is opened.
    model: PreTrainedModel
    info: dict[str, Any]
    model, info = AutoModelForCausalLM.from_pretrained(
        hf_dir,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )  # type: ignore[misc]

    # transformers would only warn, and initialize missing weights at random.
    for problem in ("missing_keys", "unexpected_keys"):
        if info[problem]:
            raise UserError(
                f"{hf_dir}: {problem} {sorted(map(str, info[problem]))[:3]}; export the checkpoint"
                " again"
            )
    model.eval()
    return model
