"""The DeepSpeed engine: the verbs of the training loop on data-parallel ranks that share state by ZeRO.

Shapes: B sequences, S tokens, V vocabulary.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from train.averaging import slot_names
from train.command import UserError
from train.config import RunConfig
from train.deepspeed.checkpoint import MOMENTS, StateFiles, read_state
from train.deepspeed.model import build_model, hf_parameters
from train.deepspeed.probing import recorded
from train.deepspeed.process import join
from train.deepspeed.settings import deepspeed_config
from train.deepspeed.sharding import sharding_of
from train.distributed import gathered
from train.engine import Batch, Snapshot, StepResult, WeightShard


class DeepSpeedEngine:
    """One rank of a run. Every rank calls every method; results are global and the same on all ranks."""

    def __init__(self, run: RunConfig, device: torch.device) -> None:
        self.run, self.device = run, device
        self.data_parallel = run.data_parallel_size(dist.get_world_size())
        config = deepspeed_config(run, self.data_parallel)
        join(device)
        model = build_model(run, config)
        self._parameters = hf_parameters(model)
        self._adamw = self._build_adamw()
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self._adamw, config=config, dist_init_required=False
        )
        self._sharding = sharding_of(self._engine, self._parameters, run.optimizer.decays)
        self._partitions = self._sharding.partitions()
        for owner in {id(partition.owner): partition.owner for partition in self._partitions}.values():
            # What AdamW makes at its first step, so that a checkpoint can hold it before.
            self._adamw.state[owner] = {
                "step": torch.zeros((), device=owner.device),
                **{moment: torch.zeros_like(owner, dtype=torch.float32, requires_grad=False) for moment in MOMENTS},
            }
        self._slots = {name: [torch.zeros_like(shard.weights) for shard in self.weights()] for name in slot_names(run)}

    def _build_adamw(self) -> torch.optim.AdamW:
        """AdamW as torch fuses it: DeepSpeed's own are compiled when first used."""
        settings = self.run.optimizer
        groups = [
            {
                "params": [each for name, each in self._parameters.items() if settings.decays(name) == decayed],
                "weight_decay": settings.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes by name, and ZeRO's stage."""
        return {"tensor": 1, "pipeline": 1, "data": self.data_parallel, "zero": self.run.zero.stage}

    def train_step(self, batch: Batch, learning_rate: float, accept: Callable[[StepResult], bool]) -> StepResult:
        """Forward, backward, then, if accepted, clip and update on one global batch."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._engine.train()
        microbatches = self._microbatches(batch)
        assert len(microbatches) == self._engine.gradient_accumulation_steps()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for index, microbatch in enumerate(microbatches):
            self._engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            sums = self._losses(self._engine, microbatch)
            # DeepSpeed divides by the microbatches and averages over the ranks.
            self._engine.backward(sums[:2].sum() / microbatch.counted_BS.numel())
            totals += sums.detach()
        result = StepResult(*self._means(totals), grad_norm=self._sharding.gradient_norm())
        if accept(result):
            assert result.is_finite(), "DeepSpeed would not take this step"
            self._engine.step()
        else:
            self._sharding.drop_gradients()
        return result

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Mean cross-entropy over the counted labels, nats per token."""
        self._engine.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for microbatch in self._microbatches(batch):
            totals += self._losses(self._engine.module, microbatch)
        return self._means(totals)[0]

    def _microbatches(self, batch: Batch) -> list[Batch]:
        """The share of this rank, on its device."""
        return batch.microbatches(
            self.run.micro_batch_size, rank=dist.get_rank(), ranks=self.data_parallel, device=self.device
        )

    def _logits(self, model: Any, inputs_BS: Tensor, documents_BS: Tensor | None) -> Tensor:
        """Logits [B, S, V] in fp32; attention stays within a document where documents are given."""
        mask_B1SS = None
        if documents_BS is not None:
            same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
            mask_B1SS = same_BSS.tril()[:, None]
        positions_BS = torch.arange(inputs_BS.shape[1], device=inputs_BS.device).expand_as(inputs_BS)
        output = model(input_ids=inputs_BS, attention_mask=mask_B1SS, position_ids=positions_BS, use_cache=False)
        logits_BSV: Tensor = output.logits
        return logits_BSV.float()

    def _losses(self, model: Any, batch: Batch) -> Tensor:
        """Sums of cross-entropy and z-loss over the counted labels, and their number: [3]."""
        logits_BSV = self._logits(model, batch.tokens_BS[:, :-1], batch.documents_BS)
        log_z_BS = logits_BSV.logsumexp(-1)
        cross_entropy_BS = log_z_BS - logits_BSV.gather(-1, batch.tokens_BS[:, 1:, None]).squeeze(-1)
        z_loss_BS = self.run.optimizer.z_loss * log_z_BS.square()
        uncounted_BS = ~batch.counted_BS
        sums = [values_BS.masked_fill(uncounted_BS, 0.0).sum() for values_BS in (cross_entropy_BS, z_loss_BS)]
        return torch.stack([*sums, batch.counted_BS.sum().to(sums[0].dtype)])

    @staticmethod
    def _means(totals: Tensor) -> tuple[float, float]:
        """Cross-entropy and z-loss per counted label over all ranks; zero where none counts."""
        dist.all_reduce(totals)
        cross_entropy, z_loss, count = totals.tolist()
        return cross_entropy / max(count, 1), z_loss / max(count, 1)

    @torch.no_grad()
    def probe(self, inputs_BS: Tensor) -> dict[str, Tensor]:
        """Logits and the outputs of all modules on rank 0; the other ranks compute them too, as stage 3 needs."""
        self._engine.eval()
        with recorded(self._engine.module) as outputs:
            logits_BSV = self._logits(self._engine.module, inputs_BS.to(self.device), None)
        return {"logits": logits_BSV.cpu(), **outputs} if dist.get_rank() == 0 else {}

    def weights(self) -> list[WeightShard]:
        """Part of the fp32 main weights that this rank holds."""
        return [
            WeightShard(partition.decayed, partition.of(partition.owner), partition.counted)
            for partition in self._partitions
        ]

    def slot(self, name: str) -> list[Tensor]:
        """A named fp32 copy of the shape of `weights()`, zero at first, saved, resharded and loaded with them."""
        return self._slots[name]

    def publish_weights(self) -> None:
        """Makes the model compute with what `weights()` now hold."""
        self._sharding.publish()

    def _state(self) -> dict[str, list[Tensor]]:
        """Everything a rank keeps, by kind, in the shape of `weights()`."""
        kinds = {"weights": [shard.weights for shard in self.weights()]}
        for moment in MOMENTS:
            kinds[moment] = [part.of(self._adamw.state[part.owner][moment]) for part in self._partitions]
        return kinds | {f"slot.{name}": shards for name, shards in self._slots.items()}

    def _model_weights(self) -> dict[str, Tensor] | None:
        """A copy of the model's weights on rank 0, None elsewhere; at stage 3 gathered one by one."""
        weights: dict[str, Tensor] | None = {} if dist.get_rank() == 0 else None
        for name, parameter in self._parameters.items():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.run.zero.stage == 3):
                if weights is not None:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copies the model's weights and, unless `weights_only`, optimizer state and slots, to be written below."""
        files = StateFiles(directory, self._model_weights())
        if not weights_only:
            steps = {int(self._adamw.state[partition.owner]["step"]) for partition in self._partitions}
            assert len(steps) == 1, "the groups of one optimizer counted different updates"
            files.add_state(self._partitions, self._state(), self.run.zero.stage, steps.pop())
        return files

    def load(self, directory: Path) -> None:
        """Loads what a snapshot with optimizer state wrote: at any world size, and any stage but 3.

        Raises:
            UserError: files are missing or do not fit the model, or stage 3 is to change its stage or world size.
            SafetensorError, OSError: a file is damaged or cannot be read, by whatever rank.
        """
        step, failure = 0, None
        try:
            step = read_state(directory, self._partitions, self._state(), self.run.zero.stage)
        except (UserError, SafetensorError, OSError) as error:
            failure = error
        failure = next((each for each in gathered(failure) if each), None)
        if failure:  # on every rank: what follows is collective
            raise failure
        for partition in self._partitions:
            self._adamw.state[partition.owner]["step"].fill_(step)
        self.publish_weights()

    @torch.no_grad()
    def start_from(self, read: Callable[[str], Tensor]) -> None:
        """Takes over the weights that `read` gives by HF name, whole, exactly in fp32."""
        for partition, shard in zip(self._partitions, self.weights(), strict=True):
            parts = shard.weights.split([piece.length for piece in partition.pieces])
            for piece, part in zip(partition.pieces, parts, strict=True):
                part.copy_(read(piece.name).flatten()[piece.start : piece.start + piece.length])
        self.publish_weights()

    def close(self) -> None:
        """Leaves the process groups. What DeepSpeed keeps goes first, or a process may abort at its exit."""
        self._engine.destroy()
        del self._engine, self._adamw, self._sharding, self._partitions, self._parameters
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
