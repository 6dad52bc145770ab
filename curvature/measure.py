"""One curvature measurement of an HF model: settings, batches, guard, trace and top eigenvalue, as one result.

Shapes: B sequences, S positions of a sequence, P parameters.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_tools.hf_model import identify, load_hf_model
from curvature.finite_difference import RELATIVE_CHANGE, FiniteDifference
from curvature.guard import Product, check_product
from curvature.hutchinson import TraceEstimate, estimate_trace
from curvature.lanczos import TopEigenvalue, top_eigenvalue
from curvature.olmo2 import DualOlmo2, HessianProduct
from curvature.parameters import Parameters
from train.command import Progress, UserError
from train.corpus import Corpus, check_vocabulary, open_corpus
from train.data import batch
from train.frozen import Frozen
from train.tracking import environment

START_PROBE = -1  # Lanczos starts from a probe that no pair uses
GUARD_STEP = RELATIVE_CHANGE / 3  # the finite-difference route is compared with itself at a smaller step


class HutchinsonSpec(Frozen):
    """Everything that decides the numbers, the model and the text aside."""

    name: Literal["hutchinson"]
    pairs: int = Field(default=32, ge=2, description="(probe, microbatch) pairs behind the trace")
    microbatch_sequences: int = Field(default=2, ge=1, description="sequences of one product")
    sequence_length: int | None = Field(default=None, ge=1, description="tokens; None is the model's context")
    eigen_sequences: int = Field(default=8, ge=1, description="sequences of the fixed batch of lambda_max")
    max_iterations: int = Field(default=50, ge=2, description="products on the fixed batch at most")
    tolerance: float = Field(default=1e-3, gt=0, description="|Hx - lambda x| / |lambda| that counts as converged")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the probes and of the order of the sequences")
    route: Literal["dual", "finite-difference"] = "dual"
    checkpointing: bool = Field(default=False, description="keep only the layers' inputs for the backward pass")


class _Finite:
    """A product that refuses to hand out NaN or infinity."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, tokens_BS1: Tensor, v_P: Tensor) -> HessianProduct:
        result = self._product(tokens_BS1, v_P)
        if not math.isfinite(result.loss) or not math.isfinite(float(result.hv_P.sum())):
            raise UserError(f"loss {result.loss} or its Hessian product is not finite; give a checkpoint that is")
        return result


def _product_and_reference(model: PreTrainedModel, spec: HutchinsonSpec) -> tuple[Product, Product]:
    if spec.route == "finite-difference":
        return FiniteDifference(model), FiniteDifference(model, relative_change=GUARD_STEP)
    return DualOlmo2(model, checkpointing=spec.checkpointing), FiniteDifference(model)


class _Batches:
    """The sequences of a measurement: a function of text and seed, the same for every model."""

    def __init__(self, corpus: Corpus, spec: HutchinsonSpec, sequence_length: int) -> None:
        self._corpus, self._spec, self._sequence_length = corpus, spec, sequence_length
        available = corpus.num_sequences(sequence_length)
        needed = max(spec.pairs * spec.microbatch_sequences, spec.eigen_sequences)
        if needed > available:
            raise UserError(
                f"{corpus.prefix} holds {available} sequences of {sequence_length} tokens, {needed} are needed; "
                f"give more text, fewer pairs or a shorter --sequence-length"
            )

    def _sequences(self, step: int, size: int) -> Tensor:
        return torch.from_numpy(
            batch(self._corpus, step=step, batch_size=size, sequence_length=self._sequence_length, seed=self._spec.seed)
        )

    def microbatch(self, index: int) -> Tensor:
        """The microbatch of pair `index`, int64 [B, S + 1]; no sequence is in two of them."""
        return self._sequences(index + 1, self._spec.microbatch_sequences)

    def fixed(self) -> list[Tensor]:
        """The fixed batch of the top eigenvalue, the first sequences of the same order, in microbatches."""
        return list(torch.split(self._sequences(1, self._spec.eigen_sequences), self._spec.microbatch_sequences))


def _mean_product(
    product: Product, microbatches: list[Tensor], *, on_product: Callable[[], None]
) -> Callable[[Tensor], Tensor]:
    """The map v -> Hv of the mean loss over all tokens of the microbatches, whose sizes may differ."""
    total = sum(len(tokens) for tokens in microbatches)

    def mean_hv(v_P: Tensor) -> Tensor:
        hv_P = torch.zeros_like(v_P)
        for tokens_BS1 in microbatches:
            hv_P.add_(product(tokens_BS1, v_P).hv_P, alpha=len(tokens_BS1) / total)
        on_product()
        return hv_P

    return mean_hv


def measure(hf_dir: Path, spec: HutchinsonSpec, data_prefix: Path) -> dict[str, Any]:
    """The content of result.json. Reads the model and the text, writes nothing.

    Raises:
        UserError: model, text and settings do not fit, a loss is not finite, or the guard refuses.
    """
    if spec.checkpointing and spec.route != "dual":
        raise UserError("--checkpointing belongs to --route dual; leave it out")
    identity, corpus = identify(hf_dir), open_corpus(data_prefix)
    # The guard's reference runs HF's code on another attention kernel than the formula the dual layers spell out.
    model = load_hf_model(hf_dir, torch.float32, attention="sdpa")
    # HF drops the gradient of the padding token's embedding, training does not: to the loss it is a token like others.
    model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]
    check_vocabulary(corpus, model.config.vocab_size)
    context = model.config.max_position_embeddings
    sequence_length = spec.sequence_length or context
    if sequence_length > context:
        raise UserError(f"sequence_length {sequence_length} is beyond the model's context {context}; shorten it")
    batches = _Batches(corpus, spec, sequence_length)
    product, reference = _product_and_reference(model, spec)
    parameters = Parameters(model)

    clock = [time.perf_counter()]
    finite = _Finite(product)
    guard = check_product(finite, reference, parameters, batches.microbatch(0), parameters.probe(spec.seed, 0))
    clock.append(time.perf_counter())
    with Progress("trace", total=spec.pairs) as progress:
        trace = estimate_trace(
            finite,
            parameters,
            (batches.microbatch(index) for index in range(spec.pairs)),
            seed=spec.seed,
            on_pair=lambda value: progress.advance(trace=value),
        )
    clock.append(time.perf_counter())
    with Progress("lambda_max, at most", total=spec.max_iterations) as progress:
        top = top_eigenvalue(
            _mean_product(finite, batches.fixed(), on_product=progress.advance),
            parameters.probe(spec.seed, START_PROBE),
            tolerance=spec.tolerance,
            max_iterations=spec.max_iterations,
        )
    clock.append(time.perf_counter())
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(("guard", "trace", "lambda_max"))}
    return {
        "model": identity,
        "spec": spec.model_dump(mode="json")
        | {
            "sequence_length": sequence_length,
            "precision": "fp32",
            "finite_difference_relative_change": RELATIVE_CHANGE,
            "data": {"prefix": str(data_prefix), "bin_sha256": corpus.manifest.bin.sha256},
        },
        "measured": _measured(trace, top, guard, parameters),
        "environment": environment() | {"seconds": seconds},
    }


def _measured(
    trace: TraceEstimate, top: TopEigenvalue, guard: dict[str, Any], parameters: Parameters
) -> dict[str, Any]:
    sizes = parameters.block_sizes()
    return {
        "loss": trace.loss.mean,
        "loss_standard_error": trace.loss.standard_error,
        "trace": trace.total._asdict() | {"probes": len(trace.per_pair), "per_pair": trace.per_pair},
        "block_traces": {name: block._asdict() | {"parameters": sizes[name]} for name, block in trace.blocks.items()},
        "lambda_max": {
            "value": top.value,
            "residual": top.residual,
            "converged": top.converged,
            "iterations": top.iterations,
        },
        "parameters": parameters.size,
        "guard": guard,
        "units": {
            "loss": "nats per token",
            "trace": "nats per token per squared parameter unit",
            "block_traces": "nats per token per squared parameter unit",
            "lambda_max.value": "nats per token per squared parameter unit",
            "lambda_max.residual": "relative to value",
            "guard": "relative differences",
        },
    }
