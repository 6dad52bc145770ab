"""The DeepSpeed engine: the verbs of the training loop on data-parallel ranks with ZeRO.

Shapes: B sequences, S tokens.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import register_external_parameter
from torch import Tensor

from base.errors import UserError
from train.averages import slot_names
from train.data.batches import Batch, Replica
from train.deepspeed.checkpoint import StateFiles, read_state
from train.deepspeed.model import (
    ModelWithLosses,
    build_model,
    compile_layers,
    hf_parameters,
    observed,
    recorded,
    recorded_linears,
)
from train.deepspeed.setup import deepspeed_config, join
from train.deepspeed.sharded_weights import OneGroupOptimizer, ShardedWeights
from train.deepspeed.sharding import (
    ParameterRange,
    Partition,
    Sharding,
    StatePart,
    by_piece,
)
from train.distributed import with_flags
from train.engine import Accept, Change, Flags, LinearPart, Revise, Snapshot, StepResult
from train.forward_record import ForwardRecord, LinearRecord
from train.model.attention import attention_kernel
from train.model.config import hidden_matrices, input_groups
from train.model.losses import Targets
from train.optimizers import matrices
from train.optimizers.settings import MatrixOptimizer
from train.optimizers.stepping import GroupStepOptimizer, Member
from train.run.config import RunConfig
from train.snapshot_memory import SnapshotMemory

DENSE_MASK = 1024  # tokens of a sequence, the most with a dense mask on a GPU


class DeepSpeedEngine:
    """One rank of a run, as `train.engine.Engine` says."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        data = run.data
        if data.document_mask and data.sequence_length > DENSE_MASK and device.type == "cuda":
            raise UserError(
                f"data.document_mask takes S x S masks under deepspeed, too slow on a GPU above"
                f" {DENSE_MASK} tokens; set engine to 'megatron'"
            )
        self.data_parallel = run.data_parallel_size(dist.get_world_size())

        # DeepSpeed takes the model and our optimizer, and shards the optimizer's weights.
        config = deepspeed_config(run, self.data_parallel)
        join(device)
        self._model = build_model(run)
        is_sharded = run.zero.stage == 3
        if not is_sharded:  # it gathers in hooks of modules, at which compiled graphs would end
            compile_layers(self._model, device)
        self._parameters = hf_parameters(self._model)
        # Stage 3 leaves nothing in the parameters themselves.
        self._sizes = {name: each.numel() for name, each in self._parameters.items()}
        hidden = hidden_matrices(run.model)
        optimizer_class = OneGroupOptimizer if is_sharded else GroupStepOptimizer
        self._optimizer = optimizer_class(
            run.optimizer,
            [
                Member(parameter, name in hidden, run.optimizer.decays(name), run.scaling_of(name))
                for name, parameter in self._parameters.items()
            ],
        )
        with_losses = ModelWithLosses(self._model, run.precision)
        self._engine, *_ = deepspeed.initialize(
            model=with_losses,
            optimizer=self._optimizer,
            config=config,
            dist_init_required=False,
        )
        if is_sharded:  # the losses read the head's weight outside of its module
            register_external_parameter(with_losses, self._model.get_output_embeddings().weight)
        sharding_class = ShardedWeights if is_sharded else Sharding
        self._sharding: ShardedWeights | Sharding = sharding_class(
            self._engine.optimizer, self._parameters
        )
        self._partitions: list[Partition] = self._sharding.partitions()
        self._memory = SnapshotMemory(device)
        # DeepSpeed has put flat parts in the place of the parameters: states are of these.
        sharding = self._sharding
        self._optimizer.start_states(
            sharding.owners if isinstance(sharding, ShardedWeights) else ()
        )
        self._matrix_states: dict[str, matrices.States] = {}
        if isinstance(run.optimizer, MatrixOptimizer):
            dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
            assert isinstance(self._sharding, Sharding)  # run.json refuses stage 3
            hidden_ones = self._sharding.matrices(run, run.optimizer, dtype)
            # No group of its own: all ranks are data-parallel here.
            self._matrix_states = matrices.register(
                run.optimizer, self._optimizer, hidden_ones, None, device
            )
        self._slots = {
            name: [torch.zeros_like(weights) for weights in self.weights()]
            for name in slot_names(run)
        }

    @property
    def replica(self) -> Replica:
        """Return the data-parallel replica that this rank is a part of."""
        return Replica(dist.get_rank(), self.data_parallel, self.run.micro_batch_size)

    @property
    def layout(self) -> dict[str, int]:
        """Return parallel sizes by name, and ZeRO's stage."""
        return {"tensor": 1, "pipeline": 1, "data": self.data_parallel, "zero": self.run.zero.stage}

    @property
    def kernels(self) -> dict[str, str]:
        """Return what computes attention, as transformers calls it, and gradients of weights."""
        run, model = self.run, self.run.model
        shape = run.micro_batch_size, run.data.sequence_length, -1, model.head_size
        dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
        query, key, value = (
            torch.empty(*shape[:2], number * model.head_size, dtype=dtype, device=self.device)
            .view(shape)
            .transpose(1, 2)
            for number in (model.num_attention_heads, *[model.num_key_value_heads] * 2)
        )
        mask = None
        if run.data.document_mask:
            square = shape[0], 1, shape[1], shape[1]
            mask = torch.empty(square, dtype=torch.bool, device=self.device)
        attention = attention_kernel(query, key, value, mask)
        return {"attention": attention, "weight_gradients": "torch, in the weights' dtype"}

    def train_step(
        self,
        batch: Batch,
        learning_rate: float,
        accept: Accept,
        flags: Flags = tuple,
        revise: Revise | None = None,
    ) -> StepResult:
        """Run forward and backward on the replica's batch; if accepted, clip and update."""
        self._optimizer.set_rate(learning_rate)

        # Forward and backward, with the sums of the replica's losses.
        self._engine.train()
        microbatches = batch.microbatches(self.run.micro_batch_size, self.device)
        sequences = len(microbatches) * self.run.micro_batch_size * self.data_parallel
        self._engine.set_train_batch_size(sequences)  # by whose microbatches DeepSpeed divides
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for index, microbatch in enumerate(microbatches):
            # Stage 1 reduces gradients at this boundary alone, stage 2 after every microbatch.
            self._engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            loss, sums = self._losses(self._engine, microbatch)
            # DeepSpeed divides by the microbatches and averages over the ranks.
            self._engine.backward(loss)
            totals += sums

        if revise:
            gradients = self.gradients()
            revise(gradients)
            self._sharding.set_gradients(gradients)
        totals = with_flags(totals, flags())
        dist.all_reduce(totals)
        norm = self._sharding.gradient_norm().to(totals)
        # The one transfer from the device in a step, but for DeepSpeed's own.
        grad_norm, *sums_of_all = torch.cat([norm.view(1), totals]).tolist()

        positions = batch.counted_BS.numel() * self.data_parallel
        result = StepResult.of(sums_of_all, positions, grad_norm)
        if accept(result):
            assert result.is_finite(), "DeepSpeed would not take this step"
            self._memory.fence()
            self._engine.step()
            self._sharding.settle()
        else:
            self._sharding.drop_gradients()
        return result

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Return the mean cross-entropy over the counted labels, nats per token."""
        self._engine.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for microbatch in batch.microbatches(self.run.micro_batch_size, self.device):
            _, sums = self._losses(self._engine.module, microbatch)
            totals += sums
        dist.all_reduce(totals)
        cross_entropy, _, counted = totals.tolist()
        return float(cross_entropy / max(counted, 1))

    def _losses(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and sums [3] in fp64 over counted labels.

        They are of cross-entropy, z-loss and the number of labels.
        """
        mask_B1SS = None
        if batch.starts_BS is not None:
            # Counting beginnings numbers the documents: tokens with one number see each other.
            documents_BS = batch.starts_BS.to(self.device).cumsum(1)
            mask_B1SS = (documents_BS[:, None, :, None] == documents_BS[:, None, None, :]).tril()
        targets = Targets(
            batch.tokens_BS[:, 1:].flatten(),
            batch.counted_BS.flatten(),
            self.run.optimizer.z_loss,
        )
        loss, sums = model(batch.tokens_BS[:, :-1], mask_B1SS, targets)
        return loss, torch.cat([sums, batch.counted_BS.double().sum()[None]])

    @torch.no_grad()
    def probe(self, inputs_BS: Tensor) -> dict[str, Tensor]:
        """Return logits and the outputs of all modules on rank 0; see `train.engine.Engine`."""
        self._engine.eval()
        with recorded(self._model) as outputs:
            logits_BSV = self._engine.module(inputs_BS.to(self.device))
        return {"logits": logits_BSV.cpu(), **outputs} if dist.get_rank() == 0 else {}

    def weights(self) -> list[Tensor]:
        """Return the fp32 main weights of this rank."""
        self._memory.fence()
        return [partition.of(partition.owner) for partition in self._partitions]

    def gradients(self) -> list[Tensor]:
        """Return the gradient of `weights()` before clipping."""
        return self._sharding.gradients(self._partitions)

    def by_parameter(self, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield HF name and this rank's part for each parameter."""
        for piece, value in by_piece(self._partitions, values):
            yield piece.name, value

    def record_forward(self, batch: Batch) -> ForwardRecord:
        """Return figures of all layers in a forward pass."""
        record = ForwardRecord()
        with observed(self._model, record, input_groups(self.run.model)):
            self.evaluate(batch)
        record.summarize()
        return record

    def linears(self) -> Iterator[LinearPart]:
        """Yield the weights of the blocks' linears that the model computes with, to be read."""
        self._memory.fence()
        yield from self._sharding.linears(hidden_matrices(self.run.model))

    def change_linears(self, change: Change) -> Callable[[], None]:
        """Have the model compute with changed weights; return what restores them."""
        self._memory.fence()
        return self._sharding.change_linears(hidden_matrices(self.run.model), change)

    @torch.no_grad()
    def record_linears(self, batch: Batch, names: Sequence[str]) -> dict[str, LinearRecord]:
        """Return weight and inputs of some linears, on rank 0."""
        # In stage 3 no rank computes alone: its weights are on all of them.
        if dist.get_rank() != 0 and self.run.zero.stage < 3:
            return {}
        self._engine.eval()
        weights = self._sharding.whole(names, names)
        records = {name: LinearRecord.of(weight) for name, weight in weights.items()}
        with recorded_linears(self._model, records):
            for microbatch in batch.microbatches(self.run.micro_batch_size, self.device):
                self._losses(self._engine.module, microbatch)
        return records if dist.get_rank() == 0 else {}

    def slot(self, name: str) -> list[Tensor]:
        """Return a named fp32 copy of the shape of `weights()`."""
        self._memory.fence()
        return self._slots[name]

    def publish_weights(self) -> None:
        """Make the model compute with the current `weights()`."""
        self._sharding.publish()

    def _state(self) -> Iterator[StatePart]:
        """Yield the state of this rank, live: in parts as of `weights()`, and of whole matrices."""

        def parts(kind: str, values: list[Tensor]) -> Iterator[StatePart]:
            for piece, value in by_piece(self._partitions, values):
                yield StatePart(kind, piece, value)

        yield from parts("weights", self.weights())
        for partition in self._partitions:
            for kind, flat in self._optimizer.state[partition.owner].items():
                for piece, value in by_piece([partition], [partition.of(flat)]):
                    yield StatePart(kind, piece, value)
        for name, shards in self._slots.items():
            yield from parts(f"slot.{name}", shards)
        for name, states in self._matrix_states.items():
            for key, tensor in states.items():
                whole = ParameterRange(f"{name}.{key}", 0, tensor.numel())
                yield StatePart("matrix", whole, tensor.view(-1))

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copy the weights and, unless `weights_only`, optimizer state and slots."""
        files = StateFiles(directory, self._memory)
        files.add_model(self._sizes, self._sharding.whole)
        if not weights_only:
            files.add_state(list(self._state()), self._optimizer.steps)
        return files

    def load(self, directory: Path) -> None:
        """Load what a snapshot with optimizer state wrote, at any world size and stage.

        Raises:
            UserError: files are missing or do not fit the model.
        """
        # These tensors are live, so reading into them sets the state.
        self._optimizer.steps = read_state(directory, list(self._state()))
        self.publish_weights()

    @torch.no_grad()
    def start_from(self, read: Callable[[str], Tensor]) -> None:
        """Set the weights to those that `read` gives by HF name, whole, in fp32."""
        for piece, part in by_piece(self._partitions, self.weights()):
            part.copy_(read(piece.name).flatten()[piece.start : piece.start + piece.length])
        self.publish_weights()

    def close(self) -> None:
        """Destroy the process groups, after DeepSpeed's objects: else a process may abort."""
        self._engine.destroy()
        del self._engine, self._model, self._optimizer
        del self._sharding, self._partitions, self._parameters
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
