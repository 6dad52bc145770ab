"""The subject of a measurement: a model and a text, loaded, put on the ranks, and guarded.

Shapes: B sequences, S positions of a sequence.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.environment import environment
from base.gpus import NO_COMPILER, has_compiler
from base.ranks import Ranks
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.model import identify
from curvature.batches import Batches
from curvature.cost.memory import check_loading
from curvature.dual.blocks import curved_family
from curvature.loading import WeightFiles
from curvature.products.exact import DualHessian
from curvature.products.guard import RELATIVE_CHANGE, check_product, difference_product
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.products.sharing import Sharing
from curvature.products.sketch import CountSketch
from curvature.settings import ProductSettings


class CurvatureSubject(NamedTuple):
    """The model and the text of a measurement.

    Attributes:
        identity: the model, as results name it.
        model: for its plain loss.
        hessian: for products.
        guard: differences of a product from finite differences.
    """

    identity: dict[str, Any]
    settings: ProductSettings
    model: CurvedModel
    hessian: DualHessian
    batches: Batches
    sharing: Sharing
    guard: dict[str, Any]

    def microbatch(self, index: int) -> Tensor:
        """Return microbatch `index`, int64 [B, S + 1]. No sequence is in two of them."""
        return self.batches.number(index, self.settings.microbatch_sequences)

    def fixed(self, sequences: int) -> list[Tensor]:
        """Return the first sequences of the order, in microbatches."""
        together = self.batches.number(0, sequences)
        return list(torch.split(together, self.settings.microbatch_sequences))

    def result(
        self, measured: dict[str, Any], more: dict[str, Any], seconds: dict[str, float]
    ) -> dict[str, Any]:
        """Return the content of result.json.

        `more` is added to the settings.
        """
        spec = self.settings.model_dump(mode="json") | {
            "route": "dual",
            "data": self.batches.described,
            "sequence_length": self.batches.sequence_length,
            "finite_difference_relative_change": RELATIVE_CHANGE,
            "ranks": self.sharing.ranks.size,
        }
        size = self.hessian.parameters.size
        return {
            "model": self.identity,
            "spec": spec | more,
            "measured": measured | {"parameters": size, "guard": self.guard},
            "environment": environment() | {"seconds": seconds},
        }


def open_model(
    hf_dir: Path, settings: ProductSettings, data_prefix: Path, ranks: Ranks, *, needed: int
) -> CurvatureSubject:
    """Load and shard a model, and check its products.

    `needed` sequences of the text will be read.

    Raises:
        UserError: model, text, settings and ranks do not fit, or the guard refuses.
    """
    sharded = settings.sharding == "fsdp"
    if ranks.rank == 0 and ranks.device.type == "cuda" and not has_compiler():
        print(NO_COMPILER, file=sys.stderr)

    # refuse what does not fit before the weights are loaded
    identity = identify(hf_dir) if ranks.rank == 0 else {}  # which hashes every file
    config = read_config(hf_dir)
    curved_family(config)
    batches = Batches(
        data_prefix,
        config,
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=needed,
    )
    check_loading(config, settings, ranks)

    files = WeightFiles(hf_dir, config)
    # The guard's reference runs HF's code with sdpa, another attention kernel than the formula that
    # the dual layers spell out. FSDP2 takes from the CPU what it shards: there empty tensors take
    # no memory.
    initial_device = torch.device("cpu") if sharded and ranks.size > 1 else ranks.device
    model = CurvedModel(
        files.empty(initial_device),
        ranks=ranks,
        sharding=settings.sharding,
        dtype=DTYPES[settings.dtype],
        checkpointing=settings.checkpointing,
        vectors=torch.device("cpu") if settings.vectors == "host" else None,
    )
    files.fill(model.parameters)

    # the guard: one product against finite differences
    hessian = DualHessian(model)
    first_BS1 = batches.number(0, settings.microbatch_sequences)
    sketch = CountSketch(model.parameters, Probe(settings.seed, 0))
    guard = check_product(
        hessian.sketched(first_BS1, sketch),
        difference_product(model, first_BS1, sketch),
        sketch,
        settings.dtype,
    )
    return CurvatureSubject(
        identity, settings, model, hessian, batches, Sharing(ranks, sharded), guard
    )
