"""The one rule for where the streams of a walk are kept, from the memory that is free.

It moves no number: what is kept is what would be computed again, and variants share nothing but
the full-precision model.
"""

import os
from dataclasses import astuple, dataclass

import torch

from base.errors import UserError
from base.host_memory import free_memory
from base.ranks import Ranks
from quant_eval.model.streamed import StreamedModel
from train.model.families import LAYERS

OTHER_BYTES = 1 << 30  # kernels' workspaces, logits, and what is allocated beside tensors
FACTOR_SQUARES = 7  # matrices [I, I] in float64 at once while a Hessian is factored, and its own
WIDE_BATCHES = 12  # of the widest inputs in fp32, while a block computes and casts one batch
WEIGHT_COPIES = 5  # of a block: full, quantized, another library's, and fp32 ones of its rows
PINNED = 2  # torch rounds pinned memory up to a power of two


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank.

    Attributes:
        shared: of what all variants use: the full-precision stream, and inputs of one linear.
        gated: of the inputs of the MLP's last linear, which are kept if there is room.
        variant: of each variant's own streams.
        work: of what computing takes beside the streams.
    """

    shared: int
    gated: int
    variant: int
    work: int


@dataclass(frozen=True)
class Room:
    """The places of the streams.

    Attributes:
        on_device: whether on the device that computes; else in pinned memory of the host.
        keeps_gated: whether the inputs of the MLP's last linear are kept from the pass that sums
            the Hessian to the one that computes the output.
        together: variants that are quantized in one walk.
    """

    on_device: bool
    keeps_gated: bool
    together: int


def sizes_of(
    model: StreamedModel, calibration: int, evaluated: int, forks: int, batch: int
) -> Sizes:
    """Return the sizes from tokens on this rank: calibration, evaluated, and of one batch.

    `forks` are the evaluated streams of a variant.
    """
    first = f"{model.family.decoder}.{LAYERS}.0."
    linears = {
        name: linear for name, linear in model.empty_linears().items() if name.startswith(first)
    }
    widths = {name.rpartition(".")[2]: linear.in_features for name, linear in linears.items()}
    attended, gated = widths[model.family.writing], widths[model.family.mlp_writing]
    hidden, size = model.config.hidden_size, model.dtype.itemsize
    block = sum(linear.weight.numel() for linear in linears.values())
    return Sizes(
        # twice: the full-precision model's last outputs stay while its stream runs again
        shared=(2 * evaluated * hidden + calibration * attended) * size,
        gated=calibration * gated * size,
        variant=(calibration + forks * evaluated) * hidden * size,
        work=OTHER_BYTES
        + FACTOR_SQUARES * 8 * gated**2
        + WEIGHT_COPIES * 4 * block
        + WIDE_BATCHES * 4 * batch * gated,
    )


def plan(sizes: Sizes, variants: int, free_device: int | None, free_host: int) -> Room:
    """Return the first plan that fits: on the device with `gated`, without it, on a GPU's host.

    `free_device` is None on a CPU, whose memory is the host's. Between host and GPU the widest
    inputs are computed again sooner than they are moved. UserError if the streams of one variant
    do not fit anywhere.
    """
    here = free_host if free_device is None else free_device
    variant = max(1, sizes.variant)
    for gated in (sizes.gated, 0):
        together = (here - sizes.work - sizes.shared - gated) // variant
        if together >= 1:
            return Room(True, bool(gated), min(together, variants))
    # On a CPU the streams alone: `work` may have been reckoned too high.
    free = free_host if free_device is None else free_host // PINNED
    together = (free - sizes.shared) // variant
    if together < 1:
        raise UserError(
            f"the streams of one quantized model take {(sizes.shared + sizes.variant) / 1e9:.3g} GB"
            f" on a rank, {free / 1e9:.3g} GB are free; start more ranks, or lower"
            " --calibration-sequences or --eval-tokens"
        )
    if free_device is None:
        return Room(True, False, 1)
    return Room(False, False, min(together, variants))


def room_for(sizes: Sizes, variants: int, ranks: Ranks) -> Room:
    """Return the plan of the rank with the least room, so that all ranks do the same."""
    # The ranks of a machine share its memory.
    host = free_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = host
    if ranks.device.type == "cuda":
        # Memory that torch holds without using it is not free to CUDA, but free to us.
        cached = torch.cuda.memory_reserved(ranks.device) - torch.cuda.memory_allocated(
            ranks.device
        )
        device = torch.cuda.mem_get_info(ranks.device)[0] + cached
    on_gpu = ranks.device.type == "cuda"
    if ranks.size > 1:
        # One maximum over the ranks serves both: negated, the least free memory is the largest.
        bounds = torch.tensor([*astuple(sizes), -device, -host], device=ranks.device)
        *most, device, host = ranks.max(bounds).tolist()
        sizes, device, host = Sizes(*most), -device, -host
    return plan(sizes, variants, device if on_gpu else None, host)
