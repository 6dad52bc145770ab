"""The probe of quantization while training: losses and output errors of rounded weights.

Its figures are a function of the weights and the held-out text, so a resumed run logs the same.
Settings and cost are in `train.run.probe`.

Shapes: O output features (rows), I input features.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from base.rounding.gptq import gptq, prepare, row_output_errors
from base.rounding.grid import round_to_nearest
from base.rounding.hessian import product_dtype
from base.rounding.spec import IntegerSpec
from train.data.batches import Batch
from train.distributed import gathered
from train.engine import Engine
from train.forward_record import LinearRecord
from train.run.config import RunConfig
from train.run.metrics import HELD_OUT_LOSS, QUANTIZATION
from train.run.probe import ProbeConfig, short_name


class QuantizationProbe:
    """The probe of a run on this rank; every rank calls `figures`.

    `held_out` holds all held-out sequences, whatever the replica.
    """

    def __init__(self, run: RunConfig, engine: Engine, held_out: Batch) -> None:
        self._settings, self._engine = run.probe, engine
        if not run.probe:
            return
        self._linears = run.probe.linears(run.model)
        self._sequences = held_out.first(run.probe.sequences)
        # A replica whose share is less than a microbatch takes it at once, without padding.
        replica = engine.replica
        size = min(replica.micro_batch_size, -(-run.probe.sequences // replica.ranks))
        self._share = self._sequences.of_replica(replica._replace(micro_batch_size=size))

    def figures(self, step: int) -> dict[str, float]:
        """Return losses in nats per token and relative output errors, if update `step` has any.

        Weights, optimizer state and averages are afterwards what they were, bit for bit.
        """
        settings = self._settings
        if not settings or step % settings.every_steps:
            return {}
        began_at = time.monotonic()
        loss = self._engine.evaluate(self._share)
        figures = {f"{QUANTIZATION}/{HELD_OUT_LOSS}": loss}
        for bits in settings.bits:
            rtn, _ = settings.specs(bits)
            with rounded(self._engine, rtn):
                quantized = self._engine.evaluate(self._share)
            figures[f"{QUANTIZATION}/{rtn.name}/{HELD_OUT_LOSS}"] = quantized
            figures[f"{QUANTIZATION}/{rtn.name}/absolute_error"] = quantized - loss
        figures |= self._output_errors(settings)
        return figures | {"probe_seconds": time.monotonic() - began_at}

    def _output_errors(self, settings: ProbeConfig) -> dict[str, float]:
        """Return output errors of some linears, each from the rank that has it."""
        own = dict[str, float]()
        for name, record in self._engine.record_linears(self._sequences, self._linears).items():
            own |= {
                f"{QUANTIZATION}/{spec}/output_error/{short_name(name)}": error
                for spec, error in output_errors(record, name, settings).items()
            }
        return {name: error for part in gathered(own) for name, error in part.items()}


def output_errors(record: LinearRecord, name: str, settings: ProbeConfig) -> dict[str, float]:
    """Return |X (W - Wq)^T|^2 / |X W^T|^2 over the inputs X of a linear, by name of spec."""
    weight_OI, hessian_II = record.weight_OI, record.inputs.mean(name)
    products = product_dtype(weight_OI.dtype)
    errors, prepared = {}, None
    for bits in settings.bits:
        rtn, by_gptq = settings.specs(bits)
        prepared = prepared or prepare(hessian_II, by_gptq, name, products)  # bits play no part
        for spec, rounded_weight in (
            (rtn, round_to_nearest(weight_OI, rtn)),
            (by_gptq, gptq(weight_OI, prepared, by_gptq)),
        ):
            dense_OI = rounded_weight.dense().to(weight_OI.dtype)
            error_O, norm_O = row_output_errors(weight_OI, dense_OI, hessian_II)
            error = error_O.sum()
            errors[spec.name] = float(error / norm_O.sum()) if error else 0.0  # 0 of a dead linear
    return errors


@contextmanager
@torch.no_grad()
def rounded(engine: Engine, spec: IntegerSpec) -> Iterator[None]:
    """Compute with rounded weights within the block, then with the exact ones again."""
    weights = engine.linears()
    own = [weight_OI.to("cpu", copy=True) for weight_OI in weights]
    for weight_OI in weights:
        weight_OI.copy_(round_to_nearest(weight_OI, spec).dense())
    yield
    for weight_OI, own_OI in zip(weights, own, strict=True):
        weight_OI.copy_(own_OI)
