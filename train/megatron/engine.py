"""The megatron-core engine: the verbs of the training loop on TP x PP x CP x DP ranks.

Shapes: B sequences, S tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from base.errors import UserError
from train.averages import slot_names
from train.data.batches import Batch, Replica
from train.distributed import gathered, with_flags
from train.engine import (
    Accept,
    Change,
    Flags,
    LinearPart,
    Revise,
    Snapshot,
    StepResult,
    change_in_place,
)
from train.forward_record import ForwardRecord, LinearRecord
from train.megatron import transformer_engine
from train.megatron.layers import kernel_of_attention
from train.megatron.model import (
    global_parameters,
    initialize_groups,
    linears,
    transformer_config,
    weight_shard,
)
from train.megatron.optimizer import (
    build_optimizer,
    clip_and_update,
    hand_over_gradients,
    register_matrices,
    squared_gradient_norm,
)
from train.megatron.optimizer_state import OptimizerState, odd_keys, slots_in
from train.megatron.pipeline import Pipeline
from train.megatron.probing import probe, record_forward, record_linears
from train.megatron.shards import ShardedSnapshot, read_boxes, read_common, shapes_of
from train.model import megatron_names
from train.run.config import RunConfig
from train.run.dcp_metadata import read_metadata
from train.snapshot_memory import SnapshotMemory


class MegatronEngine:
    """One rank of a run, as `train.engine.Engine` says."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        if run.kernels == "transformer_engine":
            transformer_engine.check_can_run(run.precision)
        if run.cuda_graphs and device.type == "cpu":
            raise UserError("cuda_graphs needs a GPU, there is none here; set cuda_graphs to false")
        self.run = run
        self.data_parallel = run.data_parallel_size(dist.get_world_size())
        initialize_groups(run)
        initialize_rng_tracker(inference_rng_tracker=True)  # the idle one: no dropout anywhere
        config = transformer_config(run)
        self._pipeline = Pipeline(run, config, device)
        self._optimizer = build_optimizer(run, self._pipeline.model)
        self._state = OptimizerState(self._optimizer, slot_names(run))
        self._memory = SnapshotMemory(device)
        # Of checkpoints of weights alone, and of others.
        self._plans: dict[bool, list[Metadata | None]] = {True: [], False: []}
        register_matrices(run, self._pipeline.model.module, self._state)
        config.finalize_model_grads_func = finalize_model_grads

    @property
    def replica(self) -> Replica:
        """Return the data-parallel replica that this rank is a part of."""
        rank = parallel_state.get_data_parallel_rank()
        return Replica(rank, self.data_parallel, self.run.micro_batch_size)

    @property
    def layout(self) -> dict[str, int]:
        """Return parallel sizes by name."""
        parallel = self.run.parallel
        return {
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "data": self.data_parallel,
        }

    @property
    def kernels(self) -> dict[str, str]:
        """Return the kernels of attention and of weight gradients."""
        run = self.run
        if run.kernels == "transformer_engine":
            return dict.fromkeys(("attention", "weight_gradients"), "transformer_engine")
        attention = kernel_of_attention(
            self._pipeline.model.module.decoder.layers[0],
            run.data.sequence_length,
            run.micro_batch_size,
            documents=run.data.document_mask,
        )
        return {"attention": attention, "weight_gradients": "torch, in fp32"}

    def train_step(
        self,
        batch: Batch,
        learning_rate: float,
        accept: Accept,
        flags: Flags = tuple,
        revise: Revise | None = None,
    ) -> StepResult:
        """Run forward and backward on the replica's batch; if accepted, clip and update."""
        self._pipeline.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        sums = self._pipeline.losses(batch, forward_only=False)
        hand_over_gradients(self._optimizer)
        if revise:
            revise(self.gradients())
        square = squared_gradient_norm(self._optimizer)
        # One reduction, and one transfer to the host, for the norm, the losses and the flags.
        square_of_all, *sums_of_all = _over_all_ranks(
            with_flags(torch.cat([square, sums]), flags())
        )

        positions = batch.counted_BS.numel() * self.data_parallel
        result = StepResult.of(sums_of_all, positions, math.sqrt(square_of_all))
        if accept(result):
            # A save may still be copying the weights that the update overwrites.
            self._memory.fence()
            clip_grad_norm = self.run.optimizer.clip_grad_norm
            clip_and_update(self._optimizer, result.grad_norm, learning_rate, clip_grad_norm)
            self._pipeline.model.start_gather()
        return result

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the mean cross-entropy over the counted labels, nats per token."""
        sums = self._pipeline.losses(batch, forward_only=True)
        cross_entropy, _, counted = _over_all_ranks(sums)
        return cross_entropy / max(counted, 1)

    def probe(self, inputs_BS: Tensor) -> dict[str, Tensor]:
        """Return logits and the outputs of all modules, whole, on rank 0."""
        return probe(self._pipeline, inputs_BS)

    def weights(self) -> list[Tensor]:
        """Return the fp32 main weights of this rank."""
        self._memory.fence()
        self._pipeline.model.finish_gather()  # in fp32 they are the model's own: nothing sends them
        return self._state.weights()

    def gradients(self) -> list[Tensor]:
        """Return the gradient of `weights()` before clipping."""
        return self._state.gradients()

    def by_parameter(self, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield an HF name and this rank's part for each parameter, once over ranks and stages."""
        named = global_parameters(self._pipeline.model.module)
        names = {parameter: name for name, parameter in named.items()}
        for piece, value in zip(self._state.pieces, values, strict=True):
            counts = param_is_not_shared(piece.parameter)  # of an embedding, the first stage's
            if counts and param_is_not_tensor_parallel_duplicate(piece.parameter):
                yield megatron_names.hf_names(names[piece.parameter])[0], value

    def record_forward(self, batch: Batch) -> ForwardRecord:
        """Return figures of this rank's layers in a forward pass."""
        with torch.no_grad():
            return record_forward(self._pipeline, batch)

    def linears(self) -> list[LinearPart]:
        """Return the weights of this stage's linears that the model computes with, to be read."""
        self._memory.fence()
        self._pipeline.model.finish_gather()
        return list(linears(self.run.model, self._pipeline.model.module))

    def change_linears(self, change: Change) -> Callable[[], None]:
        """Have the model compute with changed weights; return what restores them."""
        return change_in_place(self.linears(), change)

    @torch.no_grad()
    def record_linears(self, batch: Batch, names: Sequence[str]) -> dict[str, LinearRecord]:
        """Return weight and inputs of some linears of this stage."""
        return record_linears(self._pipeline, batch, names)

    def slot(self, name: str) -> list[Tensor]:
        """Return a named fp32 copy of the shape of `weights()`."""
        self._memory.fence()
        return self._state.slot(name)

    @torch.no_grad()
    def publish_weights(self) -> None:
        """Make the model compute with the current `weights()`, on all data-parallel ranks."""
        self._pipeline.model.finish_gather()
        self._optimizer._copy_main_params_to_model_params()
        self._pipeline.model.start_param_sync(force_sync=True)

    def _model_state(self) -> dict[str, Any]:
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        state = self._pipeline.model.module.sharded_state_dict(metadata=metadata)
        # Transformer Engine's modules have an extra state, empty under the scaling that is used
        # here: without it a checkpoint fits either kind of kernels.
        weights = {key: value for key, value in state.items() if not _is_extra(key)}
        return {"model": weights}

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copy the weights and, unless `weights_only`, optimizer state and slots."""
        model = self._model_state()
        state: dict[str, Any] = {"model": self._state.weights_to_save(model)}
        if not weights_only:
            state |= {
                "optimizer": self._state.to_save(model),
                "steps": self._state.inner_optimizer.steps,
            }
        return ShardedSnapshot(state, directory, self._memory, self._plans[weights_only])

    def load(self, directory: Path) -> None:
        """Load what a snapshot wrote at any layout, once its hashes were checked.

        Three kinds of pickles are opened, each by a list of what it may hold: `.metadata`,
        common.pt, and the descriptions of boxes of numbers.

        The model's weights are the main weights, rounded: they are not read, but published.

        Raises:
            UserError: the shards lack a key of this model or hold one more, or an object.
        """
        metadata, saved = read_metadata(directory), {}
        for key, record in metadata.state_dict_metadata.items():
            if not isinstance(record, TensorStorageMetadata):
                raise _suspicious(directory, f"the object {key!r:.80}")
            saved[key] = tuple(record.size)
        entries: list[ShardedTensor] = list(
            nested_values(self._state.to_load(self._model_state(), slots_in(saved)))
        )
        # Of all ranks: the same error on each.
        shapes = {
            key: shape for part in gathered(shapes_of(entries)) for key, shape in part.items()
        }
        odd = odd_keys(saved, shapes)
        if odd:
            raise UserError(
                f"{directory} does not fit the model of run.json (in one of the two only:"
                f" {', '.join(odd[:3])}); restore the run.json it was saved with"
            )
        try:
            # The tensors are live, so reading into them sets the state.
            read_boxes(entries, directory, metadata)
            self._state.inner_optimizer.steps = read_common(directory)["steps"]
        except UnpicklingError as error:
            reason = str(error).splitlines()[0][:300]
            raise _suspicious(directory, f"a pickle of more than numbers ({reason})") from None
        self.publish_weights()

    def start_from(self, read: Callable[[str], Tensor]) -> None:
        """Set the weights to those that `read` gives by HF name, whole, in fp32."""
        self._pipeline.model.finish_gather()
        parameters = global_parameters(self._pipeline.model.module)
        names = {parameter: name for name, parameter in parameters.items()}
        self._state.assign(lambda parameter: weight_shard(names[parameter], read, self.run.model))
        self.publish_weights()

    def close(self) -> None:
        """Destroy the process groups."""
        # No rank takes its groups down while another one is still in a collective.
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _suspicious(directory: Path, content: str) -> UserError:
    return UserError(
        f"{directory} holds {content}; do not open it with other programs, and ask where it comes"
        " from"
    )


def _over_all_ranks(parts: Tensor) -> list[float]:
    """Return the sum of all ranks' parts: the one transfer from the device in a step."""
    dist.all_reduce(parts)
    return list(parts.tolist())


def _is_extra(key: str) -> bool:
    return key.endswith("_extra_state")
