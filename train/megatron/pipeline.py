"""The pass of microbatches through this rank's stage: forward, loss and backward at any layout.

Shapes: B sequences, S tokens, H hidden size, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from train.data.batches import Batch
from train.megatron.loss import Targets
from train.megatron.model import build_model
from train.megatron.packing import packed_documents
from train.run.config import RunConfig

Report = dict[str, Tensor]
Loss = Callable[[Batch, Tensor], tuple[Tensor, Report]]


class Pipeline:
    """The pipeline stage of one rank, in mcore's DDP, and mcore's schedule over the stages."""

    def __init__(self, run: RunConfig, config: TransformerConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.data_parallel = parallel_state.get_data_parallel_world_size()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp, build_model(run, config, device))
        self._schedule = get_forward_backward_func()

    def losses(self, batch: Batch, *, forward_only: bool) -> tuple[float, float, int]:
        """Return mean cross-entropy and z-loss per counted label, and their number over all ranks.

        The batch is that of this rank's replica; the means of nothing are 0.
        Unless `forward_only`, the gradients of what `StepResult` says is minimised are added to the
        gradient buffers.
        """
        self.model.train(not forward_only)
        microbatches = batch.microbatches(self.run.micro_batch_size, self.device)
        reports = self._run(microbatches, self._loss, forward_only=forward_only)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        if parallel_state.is_pipeline_last_stage():
            sums = torch.stack([report["sums"] for report in reports]).sum(0)
            dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        if self.run.parallel.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(sums, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        cross_entropy, z_loss, counted = sums.tolist()
        return cross_entropy / max(counted, 1), z_loss / max(counted, 1), int(counted)

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
            logits_SBV, _ = self.model.module.output_layer(hidden_SBH)
            return logits_SBV.float().mean(), {"logits": logits_SBV}

        with _without_fp8(self.model.config):
            reports = self._run([probe], keep, forward_only=True)
        return reports[0]["logits"] if reports else None

    def _run(self, microbatches: list[Batch], loss: Loss, *, forward_only: bool) -> list[Report]:
        """Run microbatches through the pipeline; return their reports, on its last stage."""
        sequences, length = microbatches[0].counted_BS.shape
        reports: list[Report] = self._schedule(
            forward_step_func=partial(self._forward_step, loss),
            data_iterator=[iter(microbatches)],
            model=[self.model],
            num_microbatches=len(microbatches),
            micro_batch_size=sequences,
            seq_length=length,
            forward_only=forward_only,
            # gloo's reduce-scatter is an all-reduce with further copies.
            force_all_reduce=self.device.type == "cpu",
        )
        return reports

    def _forward_step(
        self, loss: Loss, microbatches: Iterator[Batch], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Report]]]:
        batch = next(microbatches)
        inputs_BS = batch.tokens_BS[:, :-1]
        positions_BS = torch.arange(batch.counted_BS.shape[1], device=self.device).expand_as(
            batch.counted_BS
        )
        documents = None
        if batch.starts_BS is not None:
            documents = packed_documents(batch.starts_BS, self.device)
        output = model(inputs_BS, positions_BS, None, packed_seq_params=documents)
        return output, partial(loss, batch)

    def _loss(self, batch: Batch, hidden_SBH: Tensor) -> tuple[Tensor, Report]:
        """Return the loss to differentiate, and sums of both losses and counted labels."""
        targets = Targets(
            batch.tokens_BS[:, 1:].t().flatten(),
            batch.counted_BS.t().flatten(),
            self.run.optimizer.z_loss,
        )
        loss, sums = self.model.module.output_layer(hidden_SBH, targets)
        return loss, {"sums": torch.cat([sums, batch.counted_BS.double().sum()[None]])}


@contextmanager
def _without_fp8(config: TransformerConfig) -> Iterator[None]:
    """Have mcore compute without fp8 within the block; it looks at the setting at every layer."""
    fp8, config.fp8 = config.fp8, None
    try:
        yield
    finally:
        config.fp8 = fp8
