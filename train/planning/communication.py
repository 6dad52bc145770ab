"""The collectives of data-parallel replicas on GPUs: a rule by their number, and its words.

`train.megatron.data_parallel` sets megatron-core by it, `train plan` and `study show` print it.
Replicas of one run share one set of optimizer shards, at any number:
docs/design/megatron-core.md says why.
"""

from typing import NamedTuple

from train.planning.memory import bytes_of_weight, rank_parameters
from train.planning.optimizer_states import FP32
from train.run.config import RunConfig

PADDED_REPLICAS = 256  # from which a ring is so long that messages of odd sizes cost bandwidth
PADDED_ELEMENTS = 1 << 16  # megatron-core's, 0.19


class Communication(NamedTuple):
    """The buckets in which gradients are reduced and weights gathered."""

    bucket_elements: int  # at least, unless the stage has fewer
    padded: bool  # whether a bucket is a multiple of PADDED_ELEMENTS


def communication(replicas: int) -> Communication:
    """Return the collectives of so many replicas.

    Buckets are megatron-core's own: more replicas need larger ones, for messages not to become
    shorter than the network's latency. It advises padding "at large DP counts".

    Example:
        >>> communication(8), communication(512)
        (Communication(bucket_elements=40000000, padded=False), \
Communication(bucket_elements=512000000, padded=True))
    """
    return Communication(max(40_000_000, 1_000_000 * replicas), replicas >= PADDED_REPLICAS)


def communication_words(run: RunConfig, world_size: int) -> str | None:
    """Return the collectives of a step in words; None on one replica, or with DeepSpeed's own."""
    replicas = run.data_parallel_size(world_size)
    if run.engine != "megatron" or replicas == 1:
        return None
    elements, padded = communication(replicas)
    count = max(rank_parameters(run, stage) for stage in range(run.parallel.pipeline))
    sent = count * (replicas - 1) / replicas / 1e9
    padding = f", padded to multiples of {PADDED_ELEMENTS:,}" if padded else ""
    return (
        f"a GPU sends {FP32 * sent:.1f} GB of gradients and {bytes_of_weight(run) * sent:.1f} GB of"
        f" weights a step, in buckets of {elements / 1e6:.0f} million{padding}; averaged by NCCL,"
        f" optimizer shards over all {replicas} replicas"
    )
