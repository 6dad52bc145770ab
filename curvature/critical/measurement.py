"""Losses along directions at a model: from HF directories and settings to a result.json.

All losses are of the same sequences. Ranks share their batches, and every rank holds the model and
all losses in the end: results do not depend on how many there are.

Shapes: B sequences, S positions of a sequence, V vocabulary.
"""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from base.environment import environment
from base.errors import UserError
from base.host_memory import free_memory
from base.progress import Progress
from base.ranks import Ranks
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import empty_model
from ckpt_tools.hf.model import identify
from curvature.critical.directions import Direction, MovedModel, move_from, step_to
from curvature.critical.line import PASSES, UNITS, Losses, measure_line
from curvature.settings import CriticalSettings
from curvature.slices.plane import SequenceLosses
from curvature.step.quantized import read_step
from curvature.subject import Batches
from curvature.trace.estimates import estimate_mean

LEVEL = 0.95  # coverage of the intervals


def measure(
    hf_dir: Path,
    previous: Path | None,
    quantized: Sequence[Path],
    settings: CriticalSettings,
    data_prefix: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the content of result.json of the directions at a model, without writing it.

    They are the move from `previous`, and the step to each of the `quantized` weights.

    Raises:
        UserError: models, text, settings and memory do not fit, or a loss is not finite.
    """
    clock = time.perf_counter()
    identity = identify(hf_dir) if ranks.rank == 0 else {}  # which hashes every file
    config = read_config(hf_dir)
    batches = Batches(
        data_prefix,
        config,
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=settings.sequences,
    )
    # What does not fit the model is refused before it is loaded.
    directions, sources = list[Direction](), dict[str, Any]()
    if previous:
        directions.append(move_from(previous, hf_dir))
        sources["move"] = identify(previous) if ranks.rank == 0 else {}
    for result_dir in quantized:
        direction = step_to(read_step(hf_dir, result_dir))
        if direction.name in sources:
            raise UserError(
                f"two results of --quantized are {direction.name}, {result_dir} is the second; give"
                " each spec once"
            )
        directions.append(direction)
        sources[direction.name] = {"path": str(result_dir)}
    check_memory(config, settings, ranks)

    moved = MovedModel(hf_dir, config, DTYPES[settings.dtype], ranks.device)
    norms = [moved.norm(direction) for direction in directions]  # refuses a direction of length 0
    losses = SharedLosses(
        moved.model, batches.number(0, settings.sequences), settings.batch_size, ranks
    )
    with Progress("forward passes, at most", total=2 + PASSES * len(directions)) as progress:

        def losses_at(direction: Direction | None, multiple: float) -> Losses:
            moved.move(direction, multiple)
            progress.advance()
            where = f"{multiple:.4g} of {direction.name}" if direction else "the model"
            return losses(where)

        base_B = losses_at(None, 0.0)
        # The model is at theta now, and a digit further after it.
        moved.disturb(settings.seed)
        noise = abs(float((losses("a neighbour of the model") - base_B).mean()))
        progress.advance()

        measured = {
            direction.name: measure_line(
                partial(losses_at, direction),
                base_B,
                norm=norm,
                start=direction.start,
                rise=settings.rise,
                reach=settings.reach,
                noise=noise,
                level=LEVEL,
            )
            for direction, norm in zip(directions, norms, strict=True)
        }

    return {
        "model": identity,
        "spec": settings.model_dump(mode="json")
        | {
            "name": "critical",
            "directions": sources,
            "data": batches.described,
            "sequence_length": batches.sequence_length,
            "attention": "sdpa",
            "level": LEVEL,
        },
        "measured": {
            "loss": estimate_mean(base_B, level=LEVEL)._asdict(),
            "noise": noise,
            "directions": measured,
            "forward_passes": 2 + sum(each["forward_passes"] for each in measured.values()),
            "tokens_per_pass": settings.sequences * batches.sequence_length,
            "parameters": moved.size,
            "units": UNITS,
        },
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }


class SharedLosses:
    """The losses of B sequences at whatever a model's weights are, whose batches ranks share.

    A batch holds the same sequences on any number of ranks, so its losses are the same bits.
    """

    def __init__(
        self, model: PreTrainedModel, tokens_BS1: Tensor, batch_size: int, ranks: Ranks
    ) -> None:
        self._ranks, self._sequences = ranks, len(tokens_BS1)
        # The batches of this rank, in turns: the last batch of all, which may be smaller, is last.
        own = list(torch.arange(len(tokens_BS1)).split(batch_size))[ranks.rank :: ranks.size]
        self._own_B = torch.cat(own) if own else torch.zeros(0, dtype=torch.int64)
        self._losses = SequenceLosses(model, tokens_BS1[self._own_B], batch_size)

    def __call__(self, where: str) -> NDArray[Any]:
        """Return the loss of every sequence, nats per token, float64 [B].

        Raises:
            UserError: one is not finite; `where` names the point.
        """
        losses_B = torch.zeros(self._sequences, dtype=torch.float64)
        if len(self._own_B):
            losses_B[self._own_B] = self._losses()
        self._ranks.sum(losses_B)
        # After the sum, where all ranks see the same and stop together.
        if not torch.isfinite(losses_B).all():
            raise UserError(
                f"the loss at {where} is {float(losses_B.mean())}; give a shorter --reach, or other"
                " models"
            )
        return losses_B.numpy()


def check_memory(config: PretrainedConfig, settings: CriticalSettings, ranks: Ranks) -> None:
    """Raise UserError if the model does not fit the memory of a rank in the chosen precision."""
    entries = sum(weight.numel() for weight in empty_model(config).parameters())
    needed = entries * DTYPES[settings.dtype].itemsize
    if ranks.device.type == "cuda":
        free, where = torch.cuda.mem_get_info(ranks.device)[0], "of a GPU"
    else:
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free, where = free_memory(), "of this machine"
    if needed > free:
        less = "give --dtype bf16, or " if settings.dtype == "fp32" else "take "
        raise UserError(
            f"{needed / 1e9:.3g} GB {where} are needed for the weights, {free / 1e9:.3g} GB are"
            f" free; {less}a larger one{', or fewer ranks' if ranks.size > 1 else ''}"
        )
