"""A model and a text opened for Hessian products: loaded, put on its ranks, and held against finite differences.

Shapes: B sequences, S positions of a sequence, p parameters of this rank.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.forward import read_config
from ckpt_tools.hf_model import identify, load_hf_model
from ckpt_tools.ranks import Ranks
from curvature.architectures import architecture_of
from curvature.batches import Batches
from curvature.exact import DualHessian, Hessian
from curvature.finite_difference import RELATIVE_CHANGE, DifferenceHessian
from curvature.guard import check_product
from curvature.memory import check_loading
from curvature.model import CurvedModel
from curvature.parameters import Probe
from curvature.settings import ProductSettings
from curvature.sharing import Sharing
from curvature.sketch import CountSketch
from train.command import UserError
from train.tracking import environment

GUARD_STEP = RELATIVE_CHANGE / 3  # the finite-difference route is compared with itself at a smaller step


class Opened(NamedTuple):
    """What every measurement works with.

    Attributes:
        identity: what a result says of the model.
        model: for its plain loss.
        hessian: for products.
        guard: how far a product was from finite differences.
    """

    identity: dict[str, Any]
    settings: ProductSettings
    model: CurvedModel
    hessian: Hessian
    batches: Batches
    sharing: Sharing
    guard: dict[str, Any]

    def microbatch(self, index: int) -> Tensor:
        """Microbatch `index`, int64 [B, S + 1]; no sequence is in two of them."""
        return self.batches.number(index, self.settings.microbatch_sequences)

    def fixed(self, sequences: int) -> list[Tensor]:
        """The first sequences of the order, in microbatches."""
        return list(torch.split(self.batches.number(0, sequences), self.settings.microbatch_sequences))

    def result(self, measured: dict[str, Any], more: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
        """The content of result.json; `more` is said of the settings."""
        described = self.settings.model_dump(mode="json") | {"data": self.batches.described}
        described["sequence_length"] = self.batches.sequence_length
        described["finite_difference_relative_change"] = RELATIVE_CHANGE
        ranks = self.sharing.ranks
        return {
            "model": self.identity,
            "spec": described | {"ranks": ranks.size} | more,
            "measured": measured | {"parameters": self.hessian.parameters.size, "guard": self.guard},
            "environment": environment() | {"seconds": seconds},
        }


def open_model(hf_dir: Path, settings: ProductSettings, data_prefix: Path, ranks: Ranks, *, needed: int) -> Opened:
    """Loads, shards and checks; `needed` sequences of the text will be read.

    Raises:
        UserError: model, text, settings and ranks do not fit, or the guard refuses.
    """
    settings.check()
    sharded = settings.sharding == "fsdp"
    if needed < ranks.size:
        raise UserError(f"{needed} sequences are fewer than {ranks.size} ranks; start fewer, or measure on more")
    identity = identify(hf_dir) if ranks.rank == 0 else {}  # which hashes every file
    config = read_config(hf_dir)
    if settings.route == "dual":
        architecture_of(config)  # refused before the weights are read
    batches = Batches(data_prefix, config, sequence_length=settings.sequence_length, seed=settings.seed, needed=needed)
    check_loading(config, settings, ranks)
    # The guard's reference runs HF's code on another attention kernel than the formula the dual layers spell out.
    loaded = load_hf_model(hf_dir, torch.float32, settings.attention or "sdpa")
    model = CurvedModel(
        # FSDP2 moves block by block what no single GPU might hold; a rank alone holds the whole
        loaded if sharded and ranks.size > 1 else loaded.to(ranks.device),  # type: ignore[arg-type]
        ranks=ranks,
        sharding=settings.sharding,
        dual=settings.route == "dual",
        dtype=DTYPES[settings.dtype],
        checkpointing=settings.checkpointing,
        vectors=torch.device("cpu") if settings.vectors == "host" else None,
    )
    hessian: Hessian
    if settings.route == "dual":
        hessian, reference = DualHessian(model), DifferenceHessian(model)
    else:
        hessian, reference = DifferenceHessian(model), DifferenceHessian(model, relative_change=GUARD_STEP)
    first = batches.number(0, settings.microbatch_sequences)
    sketch = CountSketch(model.parameters, Probe(settings.seed, 0))
    guard = check_product(hessian, reference, first, sketch, settings.dtype)
    return Opened(identity, settings, model, hessian, batches, Sharing(ranks, sharded), guard)
