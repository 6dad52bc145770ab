"""The megatron-core engine: the verbs of the training loop on TP x PP x DP ranks.

Shapes: B sequences, S tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from train.command import UserError
from train.config import RunConfig
from train.engine import Batch, Snapshot, StepResult, WeightShard
from train.megatron.loss import cross_entropy_and_log_normalizer
from train.megatron.model import build_model, transformer_config
from train.megatron.optimizer import build_optimizer, set_learning_rate
from train.megatron.shards import InProcessSave

# The one distributed-optimizer format that loads at another TP, PP and DP.
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
Microbatch = tuple[Tensor, Tensor]  # sequences [B, S + 1], weight of each [B]


class MegatronEngine:
    """One rank of a run. Every rank calls every method; results are global and the same on all ranks."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.data_parallel = run.data_parallel_size(dist.get_world_size())
        parallel_state.initialize_model_parallel(run.parallel.tensor, run.parallel.pipeline)
        self._config = transformer_config(run)
        model = build_model(run, self._config, self.device)
        self._model = DistributedDataParallel(
            self._config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
        )
        self._optimizer = build_optimizer(run, self._model)
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._forward_backward = get_forward_backward_func()

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes by name."""
        return {
            "tensor": self.run.parallel.tensor,
            "pipeline": self.run.parallel.pipeline,
            "data": self.data_parallel,
        }

    def train_step(self, batch: Batch, learning_rate: float, accept: Callable[[StepResult], bool]) -> StepResult:
        """Forward, backward, then, if accepted, clip and update on one global batch."""
        set_learning_rate(self._optimizer, learning_rate, self.run.optimizer.weight_decay)
        self._model.train()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        cross_entropy, z_loss = self._run_microbatches(batch, forward_only=False)
        result = StepResult(cross_entropy, z_loss, grad_norm=0.0)
        if not accept(result):
            return result
        _, grad_norm, _ = self._optimizer.step()
        return result._replace(grad_norm=float(grad_norm))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Mean cross-entropy over the counted labels, nats per token."""
        self._model.eval()
        return self._run_microbatches(batch, forward_only=True)[0]

    def _run_microbatches(self, batch: Batch, forward_only: bool) -> tuple[float, float]:
        """Mean cross-entropy and z-loss over the sequences, on every rank."""
        sequences_BS = batch.tokens_BS
        micro, count = self.run.micro_batch_size, len(sequences_BS)
        num_micro = -(-count // (micro * self.data_parallel))
        padding = num_micro * micro * self.data_parallel - count
        assert forward_only or not padding
        weights_B = torch.cat([torch.ones(count), torch.zeros(padding)])
        weights_B *= len(weights_B) / count
        sequences_BS = torch.cat([sequences_BS, sequences_BS[:1].expand(padding, -1)])
        rank = parallel_state.get_data_parallel_rank()
        mine = (
            (sequences.to(self.device), weights.to(self.device))
            for sequences, weights in zip(
                sequences_BS.unflatten(0, (num_micro, self.data_parallel, micro))[:, rank],
                weights_B.unflatten(0, (num_micro, self.data_parallel, micro))[:, rank],
                strict=True,
            )
        )
        outputs = self._schedule(
            self._forward_step, mine, num_micro, (micro, self.run.data.sequence_length), forward_only=forward_only
        )
        means = torch.zeros(2, dtype=torch.float64, device=self.device)
        if parallel_state.is_pipeline_last_stage():
            means = torch.stack([output["means"] for output in outputs]).mean(0)
            dist.all_reduce(means, group=parallel_state.get_data_parallel_group())
            means /= self.data_parallel
        self._broadcast_from_last_stage(means)
        return means[0].item(), means[1].item()

    def _schedule(
        self,
        forward_step: Callable[..., tuple[Tensor, Any]],
        microbatches: Iterator[Any] | None,
        num_micro: int,
        shape: tuple[int, int],
        *,
        forward_only: bool,
    ) -> list[dict[str, Any]]:
        """Runs microbatches of `shape` [B, S] through the pipeline; what their losses report, on its last stage."""
        outputs: list[dict[str, Any]] = self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=microbatches,
            model=[self._model],
            num_microbatches=num_micro,
            micro_batch_size=shape[0],
            seq_length=shape[1],
            forward_only=forward_only,
        )
        return outputs

    def _forward_step(self, microbatches: Iterator[Microbatch], model: DistributedDataParallel) -> tuple[Tensor, Any]:
        sequences_BS, weights_B = next(microbatches)
        return self._logits(sequences_BS[:, :-1], model), partial(self._loss, sequences_BS[:, 1:], weights_B)

    @staticmethod
    def _logits(inputs_BS: Tensor, model: DistributedDataParallel) -> Tensor:
        positions_BS = torch.arange(inputs_BS.shape[1], device=inputs_BS.device).expand_as(inputs_BS)
        logits: Tensor = model(inputs_BS, positions_BS, None)
        return logits

    def _loss(self, labels_BS: Tensor, weights_B: Tensor, logits_BSV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to differentiate, and the [2] means of cross-entropy and z-loss to report."""
        cross_entropy_BS, log_z_BS = cross_entropy_and_log_normalizer(logits_BSV, labels_BS)
        z_loss_BS = self.run.optimizer.z_loss * log_z_BS.square()
        cross_entropy = (cross_entropy_BS.mean(1) * weights_B).mean()
        z_loss = (z_loss_BS.mean(1) * weights_B).mean()
        return cross_entropy + z_loss, {"means": torch.stack([cross_entropy, z_loss]).detach().double()}

    @staticmethod
    def _broadcast_from_last_stage(values: Tensor) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group)

    @torch.no_grad()
    def logits(self, inputs_BS: Tensor) -> Tensor:
        """Logits [B, S, V] in fp32, on every rank, on the CPU. One microbatch: meant for a small probe."""
        self._model.eval()
        stored: list[Tensor] = []

        def forward_step(_: Any, model: DistributedDataParallel) -> tuple[Tensor, Any]:
            def keep(logits_BSV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                stored.append(logits_BSV)
                return logits_BSV.float().mean(), {}

            return self._logits(inputs_BS.to(self.device), model), keep

        self._schedule(forward_step, None, 1, (inputs_BS.shape[0], inputs_BS.shape[1]), forward_only=True)
        whole_BSV = torch.zeros(*inputs_BS.shape, self.run.model.vocab_size, device=self.device)
        if parallel_state.is_pipeline_last_stage():
            local_BSV = stored[0].float().contiguous()
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(local_BSV) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, local_BSV, group)
            whole_BSV = torch.cat(parts, -1)
        self._broadcast_from_last_stage(whole_BSV)
        return whole_BSV.cpu()

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        metadata = {**SHARDING, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        model = self._model.module.sharded_state_dict(metadata=metadata)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def weights(self) -> list[WeightShard]:
        """Part of the fp32 main weights that this rank holds."""
        raise NotImplementedError

    def slot(self, name: str) -> list[Tensor]:
        """A named fp32 copy of the shape of `weights()`."""
        raise NotImplementedError(name)

    def publish_weights(self) -> None:
        """Makes the model compute with what `weights()` now hold."""
        raise NotImplementedError

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copies what a checkpoint holds."""
        assert not weights_only
        return _Snapshot(self, directory)

    def load(self, directory: Path) -> None:
        """Loads shards written at any TP, PP and DP. Hash-check them first: they hold pickles.

        Raises:
            UserError: the shards lack a key of this model or hold one more.
        """
        try:
            state = dist_checkpointing.load(
                self._sharded_state(loading=True), str(directory), strict=StrictHandling.RAISE_ALL
            )
        except CheckpointingException as error:
            raise UserError(
                f"{directory} does not fit the model of run.json ({str(error).splitlines()[0][:300]}); delete it to go "
                f"on from the checkpoint before it"
            ) from error
        self._model.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Leaves the process groups."""
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _Snapshot:
    def __init__(self, engine: MegatronEngine, directory: Path) -> None:
        self._engine, self._directory = engine, directory

    def write(self) -> list[str]:
        return []

    def seal(self) -> list[str]:
        state = self._engine._sharded_state(loading=False)
        dist_checkpointing.save(state, str(self._directory), InProcessSave())
        return []
