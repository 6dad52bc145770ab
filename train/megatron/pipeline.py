"""How microbatches pass through this rank's chunks of the model: forward, loss and backward at every layout.

Shapes: B sequences, S tokens, V vocabulary (rows of this rank until they are gathered).
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from train.config import RunConfig
from train.engine import Batch
from train.megatron.layers import document_mask
from train.megatron.loss import cross_entropy_and_log_normalizer
from train.megatron.model import build_chunks

Report = dict[str, Tensor]
Loss = Callable[[Batch, Tensor], tuple[Tensor, Report]]


class Pipeline:
    """The chunks of the model on one rank, each in mcore's DistributedDataParallel, and mcore's schedule over them."""

    def __init__(self, run: RunConfig, config: TransformerConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.data_parallel = parallel_state.get_data_parallel_world_size()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in build_chunks(run, config, device)]
        self._schedule = get_forward_backward_func()

    def losses(self, batch: Batch, *, forward_only: bool) -> tuple[float, float]:
        """Mean cross-entropy and z-loss per counted label, on every rank; 0 where none counts.

        Unless `forward_only`, the gradients of what `StepResult` says is minimised are added to the gradient buffers.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
        reports = self._run(self._microbatches(batch), self._loss, forward_only=forward_only)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if parallel_state.is_pipeline_last_stage():
            sums = torch.stack([report["sums"] for report in reports]).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._broadcast_from_last_stage(sums)
        cross_entropy, z_loss, counted = sums.tolist()
        return cross_entropy / max(counted, 1), z_loss / max(counted, 1)

    @torch.no_grad()
    def logits(self, inputs_BS: Tensor) -> Tensor | None:
        """Logits [S, B, V], on the last stage, of one microbatch: this rank's tokens and part of the vocabulary.

        At some layouts the sequence is padded, or computed more than once.
        """
        for chunk in self.chunks:
            chunk.eval()
        parallel, length = self.run.parallel, inputs_BS.shape[1]
        pieces = parallel.tensor if parallel.sequence else 1
        pieces *= 2 * parallel.context if parallel.context > 1 else 1
        padded_BS = torch.nn.functional.pad(inputs_BS, (0, -length % pieces + 1))  # what follows changes nothing before
        probe = Batch.of(padded_BS.to(self.device))
        probe = probe._replace(counted_BS=probe.counted_BS.to(self.device))
        if self.run.data.document_masking:
            probe = probe._replace(documents_BS=torch.zeros_like(probe.tokens_BS[:, 1:]))

        def keep(_: Batch, logits_BSV: Tensor) -> tuple[Tensor, Report]:
            return logits_BSV.float().mean(), {"logits": logits_BSV}

        reports = self._run([probe] * self._smallest_number, keep, forward_only=True)
        return reports[0]["logits"].transpose(0, 1) if reports else None

    @property
    def _smallest_number(self) -> int:
        """Microbatches that an interleaved schedule needs, or a multiple of it."""
        return self.run.parallel.pipeline if self.run.parallel.virtual_pipeline > 1 else 1

    def _microbatches(self, batch: Batch) -> list[Batch]:
        """The share of this rank, on its device, as many as the schedule needs."""
        return batch.microbatches(
            self.run.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            ranks=self.data_parallel,
            device=self.device,
            multiple_of=self._smallest_number,
        )

    def _run(self, microbatches: list[Batch], loss: Loss, *, forward_only: bool) -> list[Report]:
        """Runs them through the pipeline; what their losses report, on its last stage."""
        sequences, length = microbatches[0].counted_BS.shape
        reports: list[Report] = self._schedule(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=[iter(microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(microbatches),
            micro_batch_size=sequences,
            seq_length=length,
            forward_only=forward_only,
            force_all_reduce=self.device.type == "cpu",  # gloo's reduce-scatter is one too, and copies besides
        )
        return reports

    def _forward_step(
        self, loss: Loss, microbatches: Iterator[Batch], chunk: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Report]]]:
        batch = next(microbatches)
        mask = None if batch.documents_BS is None else document_mask(batch.documents_BS)
        inputs_BS = _own_part(batch.tokens_BS[:, :-1])
        positions_BS = _own_part(
            torch.arange(batch.counted_BS.shape[1], device=self.device).expand_as(batch.counted_BS)
        )
        return chunk(inputs_BS, positions_BS, mask), partial(loss, batch)

    def _loss(self, batch: Batch, logits_BSV: Tensor) -> tuple[Tensor, Report]:
        """The loss to differentiate, over all positions, and the sums of cross-entropy, z-loss and counted labels."""
        counted_BS = _own_part(batch.counted_BS)
        cross_entropy_BS, log_z_BS = cross_entropy_and_log_normalizer(logits_BSV, _own_part(batch.tokens_BS[:, 1:]))
        cross_entropy_BS = cross_entropy_BS.masked_fill(~counted_BS, 0.0)
        z_loss_BS = (self.run.optimizer.z_loss * log_z_BS.square()).masked_fill(~counted_BS, 0.0)
        sums = torch.stack([x_BS.detach().double().sum() for x_BS in (cross_entropy_BS, z_loss_BS, counted_BS)])
        return (cross_entropy_BS + z_loss_BS).sum() / batch.counted_BS.numel(), {"sums": sums}

    @staticmethod
    def _broadcast_from_last_stage(values: Tensor) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group)


def _own_part(x_BS: Tensor) -> Tensor:
    """What this context-parallel rank r of R computes of a sequence: pieces r and 2R - 1 - r of its 2R.

    Early tokens attend to less than late ones; in pairs all ranks have the same work.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return x_BS
    rank = parallel_state.get_context_parallel_rank()
    pieces = x_BS.chunk(2 * ranks, 1)
    return torch.cat([pieces[rank], pieces[-1 - rank]], 1)
