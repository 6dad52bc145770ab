"""Forward and backward pass of a microbatch as one CUDA graph. Not run on a GPU yet.

A GPU starts the kernels of a graph at once, one after the other; the host launches them one by one.
megatron-core's graphs of single layers take no hooks but its own, and neither layers that are
computed again; its graph of a whole step has the collectives of its overlap in it. This one has no
collective: it stands for all microbatches but the first, which waits for weights that are still on
their way, and the last, which reduces gradients. Those, evaluation and probes run as without it.

Weights and gradient buffers stay where they are in memory as long as a run trains. The activations
in the graph have memory of their own (`train.planning.memory`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from train.data.batches import Batch

Report = dict[str, Tensor]


class MicrobatchGraph:
    """The recorded pass, and the memory that its inputs are copied to.

    Args:
        differentiate: adds the gradients of a microbatch, of so many, to the gradient buffers, and
            returns its sums; the shapes of microbatches are always the same.
    """

    def __init__(self, differentiate: Callable[[Batch, int], Report]) -> None:
        self._differentiate = differentiate
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_microbatches = 0

    def replay(self, batch: Batch, num_microbatches: int) -> Report:
        """Differentiate a microbatch by the graph, which the first call records.

        In a batch-size warm-up their number changes, and with it the factor of the loss.
        """
        if num_microbatches != self._num_microbatches:
            self._graph = None  # frees its memory for the next one
            self._graph = self._record(batch, num_microbatches)
            self._num_microbatches = num_microbatches
        assert self._graph is not None
        for static, given in zip(self._inputs[:2], batch[:2], strict=True):
            static.copy_(given)
        self._graph.replay()
        return {name: value.clone() for name, value in self._report.items()}

    def _record(self, batch: Batch, num_microbatches: int) -> torch.cuda.CUDAGraph:
        """Record the pass without computing it, after a microbatch that has compiled all of it."""
        self._inputs = Batch(batch.tokens_BS.clone(), batch.counted_BS.clone())
        # The ends of backward that megatron-core's DDP keeps were made on another stream.
        torch.autograd.graph.set_override_stale_capture_stream(True)
        graph = torch.cuda.CUDAGraph()
        # Threads that watch NCCL, or copy a snapshot, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._report = self._differentiate(self._inputs, num_microbatches)
        return graph
