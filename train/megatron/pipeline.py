"""The pass of microbatches through this rank's stage: forward, loss and backward at any layout.

Shapes: B sequences, S tokens, H hidden size, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from train.data.batches import Batch
from train.megatron.cuda_graph import MicrobatchGraph, Report
from train.megatron.data_parallel import DataParallel
from train.megatron.model import build_model
from train.model.documents import document_bounds
from train.model.losses import Targets
from train.run.config import RunConfig

Loss = Callable[[Batch, Tensor], tuple[Tensor, Report]]
Microbatches = Iterator[tuple[int, Batch]]  # with their places in the step
Step = tuple[Tensor, Callable[[Tensor], tuple[Tensor, Report]]]  # an output, and its loss


class Pipeline:
    """The pipeline stage of one rank, and mcore's schedule over the stages."""

    def __init__(self, run: RunConfig, config: TransformerConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.model = DataParallel(config, build_model(run, config, device), device)
        self._schedule = get_forward_backward_func()
        self._graph = MicrobatchGraph(self._differentiate) if run.cuda_graphs else None

    def losses(self, batch: Batch, *, forward_only: bool) -> Tensor:
        """Return sums of cross-entropy and z-loss over this replica's counted labels, and their
        number: [3] fp64.

        One rank of a replica returns them, the others zeros: the sum over all ranks is that over
        all replicas.
        Unless `forward_only`, the gradients of what `StepResult` says is minimised are added to the
        gradient buffers.
        """
        if self.model.training == forward_only:  # mcore walks through all modules
            self.model.train(not forward_only)
        microbatches = batch.microbatches(self.run.micro_batch_size, self.device)
        reports = self._run(microbatches, self._loss, forward_only=forward_only)
        if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
            return torch.stack([report["sums"] for report in reports]).sum(0)
        return torch.zeros(3, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def logits(self, inputs_BS: Tensor) -> Tensor | None:
        """Return logits [S, B, V] of one microbatch, on the last stage: a part of the vocabulary.

        Under sequence parallelism the sequence is padded. Matrix products are in the precision of
        the weights, which an export has too: a run in fp8 leaves its autocast off.
        """
        self.model.eval()
        parallel, length = self.run.parallel, inputs_BS.shape[1]
        pieces = parallel.tensor if parallel.sequence else 1
        # Attention is causal: padding at the end changes nothing before.
        padded_BS = torch.nn.functional.pad(inputs_BS, (0, -length % pieces + 1))
        probe = Batch.of(padded_BS.to(self.device))
        probe = probe._replace(counted_BS=probe.counted_BS.to(self.device))

        def keep(_: Batch, hidden_SBH: Tensor) -> tuple[Tensor, Report]:
            logits_SBV, _ = self._head(hidden_SBH)
            # mcore takes a loss from every pass, also without backward: any scalar does.
            return logits_SBV.float().mean(), {"logits": logits_SBV}

        with _without_fp8(self.model.config):
            reports = self._run([probe], keep, forward_only=True)
        return reports[0]["logits"] if reports else None

    def _run(self, microbatches: list[Batch], loss: Loss, *, forward_only: bool) -> list[Report]:
        """Run microbatches through the pipeline; return their reports, on its last stage."""
        sequences, length = microbatches[0].counted_BS.shape
        step = partial(self._forward_step, loss)
        if self._graph is not None and not forward_only:
            step = partial(self._replayed_step, self._graph, len(microbatches))
        reports: list[Report] = self._schedule(
            forward_step_func=step,
            data_iterator=[iter(enumerate(microbatches))],
            model=[self.model],
            num_microbatches=len(microbatches),
            micro_batch_size=sequences,
            seq_length=length,
            forward_only=forward_only,
        )
        return reports

    def _replayed_step(
        self, graph: MicrobatchGraph, number: int, microbatches: Microbatches, model: DataParallel
    ) -> Step:
        """Compute as `_forward_step` does; in the middle of a step differentiate at once."""
        index, batch = next(microbatches)
        if index in (0, number - 1):
            return self._forward_step(self._loss, iter([(index, batch)]), model)
        report = graph.replay(batch, number)
        # mcore goes back only from what has a gradient.
        return batch.counted_BS.new_zeros((), dtype=torch.float32), lambda zero: (zero, report)

    def _differentiate(self, batch: Batch, number: int) -> Report:
        """Add the gradients of one of so many microbatches to the buffers, as mcore does."""
        hidden_SBH, loss_of = self._forward_step(self._loss, iter([(0, batch)]), self.model)
        loss, report = loss_of(hidden_SBH)
        (loss / number).backward()
        return report

    def _forward_step(self, loss: Loss, microbatches: Microbatches, model: DataParallel) -> Step:
        _, batch = next(microbatches)
        inputs_BS = batch.tokens_BS[:, :-1]
        positions_BS = torch.arange(batch.counted_BS.shape[1], device=self.device).expand_as(
            batch.counted_BS
        )
        documents = None
        if batch.starts_BS is not None:
            documents = self._packed(batch.starts_BS)
        output = model(
            inputs_BS,
            positions_BS,
            None,
            packed_seq_params=documents,
            output_processor=lambda *, hidden_states, **_: hidden_states,  # the loss calls the head
        )
        return output, partial(loss, batch)

    def _packed(self, starts_BS: Tensor) -> PackedSeqParams:
        """Return the documents of a microbatch for the attention; mcore itself packs nothing."""
        bounds = document_bounds(starts_BS)
        # Taken on the host, before the copy: to read it from the GPU would wait for the GPU.
        longest = int(bounds.diff().max())
        bounds = bounds.to(self.device, non_blocking=True)
        return PackedSeqParams("sbhd", bounds, bounds, None, None, longest, longest)

    def _loss(self, batch: Batch, hidden_SBH: Tensor) -> tuple[Tensor, Report]:
        """Return the loss to differentiate, and sums of both losses and counted labels."""
        # Labels in the order of hidden states [S, B, H] flattened: sequences vary fastest.
        targets = Targets(
            batch.tokens_BS[:, 1:].t().flatten(),
            batch.counted_BS.t().flatten(),
            self.run.optimizer.z_loss,
        )
        # mcore divides the loss by the microbatches, and its DDP the gradient by the replicas.
        loss, sums = self._head(hidden_SBH, targets)
        return loss, {"sums": torch.cat([sums, batch.counted_BS.double().sum()[None]])}

    def _head(self, hidden_SBH: Tensor, targets: Targets | None = None) -> tuple[Tensor, Any]:
        """Call the head, which has no weight of its own on a stage with the embedding it is."""
        model = self.model.module
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        outputs: tuple[Tensor, Any] = model.output_layer(hidden_SBH, targets, weight)
        return outputs


@contextmanager
def _without_fp8(config: TransformerConfig) -> Iterator[None]:
    """Have mcore compute without fp8 within the block; it looks at the setting at every layer."""
    fp8, config.fp8 = config.fp8, None
    try:
        yield
    finally:
        config.fp8 = fp8
