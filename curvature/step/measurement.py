"""Curvature along quantization steps of a model: model, steps and products put together."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from base.errors import UserError
from base.progress import Progress
from base.ranks import Ranks
from ckpt_tools.hf.forward import names_in_files
from curvature.cost.memory import check_room
from curvature.products.exact import Quadratic
from curvature.products.parameters import block_of
from curvature.products.probes import rademacher
from curvature.settings import StepSettings
from curvature.step.prediction import UNITS, Vector, predict
from curvature.step.quantized import QuantizationStep, read_step
from curvature.subject import CurvatureSubject, open_model

VECTORS = 2  # over all parameters: theta, and theta + delta
COPIES = 3  # of the step's tensors: itself, random signs, and their product


def measure(
    hf_dir: Path,
    result_dirs: Sequence[Path],
    settings: StepSettings,
    data_prefix: Path,
    ranks: Ranks,
) -> Iterator[dict[str, Any]]:
    """Yield the content of result.json for each result of a quantized model.

    Nothing is written. The model is loaded and guarded once for all of them.

    Raises:
        UserError: a quantized model is another's, model, text, settings and ranks do not fit, a
            figure is not finite, or the guard refuses.
    """
    if ranks.size > 1 and settings.sharding == "none":
        raise UserError(
            f"{ranks.size} ranks share the products of a step; give --sharding fsdp, or start one"
            " process"
        )
    clock = time.perf_counter()
    # Results that do not fit the model are refused before it is loaded.
    steps = [read_step(hf_dir, result_dir) for result_dir in result_dirs]
    needed = settings.microbatches * settings.microbatch_sequences
    subject = open_model(hf_dir, settings, data_prefix, ranks, needed=needed)
    _check_room(subject, settings, max(_entries(step) for step in steps))
    common = _Common(subject, settings)
    for result_dir, step in zip(result_dirs, steps, strict=True):
        measured = _predicted(subject, step, settings, common) | {
            "quantization": step.measured,
            "units": UNITS | {"quantization": "nats per token, on its own text"},
        }
        quantized = {"path": str(result_dir), "spec": step.spec}
        more = {"name": f"step-{step.spec}", "quantized": quantized}
        yield subject.result(measured, more, {"all": time.perf_counter() - clock})
        clock = time.perf_counter()


def _entries(step: QuantizationStep) -> int:
    """Return the entries of the tensors that a step may move."""
    return sum(math.prod(tensor.shape) for tensor in step.quantized.values())


def _check_room(subject: CurvatureSubject, settings: StepSettings, entries: int) -> None:
    """Raise UserError if a step of so many entries does not fit the memory of this rank."""
    parameters = (VECTORS, subject.entries)
    # Tensors of the step are on the host, whole on every rank.
    tensors, host = (COPIES, entries), torch.device("cpu")
    device = subject.hessian.parameters.device
    if device == host:
        check_room(settings, [parameters, tensors], host)
    else:
        check_room(settings, [parameters], device)
        check_room(settings, [tensors], host)


class _Common:
    """Figures of a microbatch that do not depend on the step, computed once for all steps."""

    def __init__(self, subject: CurvatureSubject, settings: StepSettings) -> None:
        self._subject, self._seed = subject, settings.seed
        self._losses: dict[int, float] = {}
        self._products: dict[tuple[int, frozenset[str]], dict[str, float]] = {}

    def loss(self, index: int) -> float:
        """Return the loss before a step."""
        if index not in self._losses:
            self._losses[index] = self._subject.model.loss(self._subject.microbatch(index)).value
        return self._losses[index]

    def random(self, index: int, delta: Vector) -> tuple[Vector, dict[str, float]]:
        """Return signs v for the tensors of delta, and v_t'(Hv)_t."""
        hessian = self._subject.hessian
        which: dict[str, Any] = {"seed": self._seed, "probe": index}
        # Of whole tensors, as delta is; `take` cuts out this rank's part.
        signs = {
            name: rademacher(name, 0, moved.numel(), dtype=moved.dtype, **which).view_as(moved)
            for name, moved in delta.items()
        }
        # v'Hv depends on a step only by the tensors that it moves.
        key = index, frozenset(delta)
        if key not in self._products:
            v = hessian.parameters.take(signs)
            self._products[key] = hessian.quadratic(self._subject.microbatch(index), v).dots
        return signs, self._products[key]


def _predicted(
    subject: CurvatureSubject, step: QuantizationStep, settings: StepSettings, common: _Common
) -> dict[str, Any]:
    parameters, files = subject.hessian.parameters, names_in_files(subject.model.entry.model)

    # the step in the names and shapes of the model
    delta = {
        name: moved.view(parameters.shapes[name])
        for name in parameters.weights
        if (moved := step.delta(files[name])) is not None
    }
    # Products of `predict`: the step, the step with random signs, and each block's part.
    total = settings.microbatches * (2 + len({block_of(name) for name in delta}))

    with Progress(f"step of {step.spec}", total=total) as progress:

        def evaluate(index: int, v: Vector) -> Quadratic:
            progress.advance()
            return subject.hessian.quadratic(subject.microbatch(index), parameters.take(v))

        def loss_moved(index: int, v: Vector) -> float:
            if not v:
                return common.loss(index)
            theta_p = parameters.point()
            try:
                # In place: a third vector would be as large as the model.
                parameters.move(parameters.take(v).add_(theta_p))
                return subject.model.loss(subject.microbatch(index)).value
            finally:
                parameters.move(theta_p)

        return predict(
            evaluate,
            loss_moved,
            delta,
            lambda index: common.random(index, delta),
            microbatches=settings.microbatches,
            level=settings.level,
        )
