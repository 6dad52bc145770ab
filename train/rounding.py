"""The probe of quantization while training: losses and output errors of rounded weights.

Its figures are a function of the weights and the held-out text, so a resumed run logs the same.
Settings and cost are in `train.run.probe`. Here weights are only set and measured: a function that
the probe is handed rounds them, the one of `quant_eval`, so that both give the same weights. As
`quant_eval` imports `train`, it is looked up by its name, and only for a run that has a probe.

Shapes: O output features (rows), I input features.
"""

import time
from collections.abc import Callable, Sequence
from importlib import import_module

from torch import Tensor

from base.hessian import row_output_errors
from train.data.batches import Batch
from train.distributed import gathered
from train.engine import Engine
from train.forward_record import LinearRecord
from train.run.config import RunConfig
from train.run.metrics import HELD_OUT_LOSS, QUANTIZATION
from train.run.probe import ProbeConfig, short_name

# Takes names of specs, a weight, the mean of x x^T of its inputs where a spec needs it, and the
# weight's name for messages; returns the rounded weights, fp32.
Rounding = Callable[[Sequence[str], Tensor, Tensor | None, str], list[Tensor]]

ROUNDING = "quant_eval.probing.round_by_names"


def load_rounding() -> Rounding:
    """Return the function that rounds weights by names of specs."""
    module, _, name = ROUNDING.rpartition(".")
    rounding: Rounding = getattr(import_module(module), name)
    return rounding


class QuantizationProbe:
    """The probe of a run on this rank; every rank calls `figures`.

    `held_out` holds all held-out sequences, whatever the replica.
    """

    def __init__(self, run: RunConfig, engine: Engine, held_out: Batch) -> None:
        self._settings, self._engine = run.probe, engine
        if not run.probe:
            return
        self._rounding = load_rounding()
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
            quantized = self._rounded_loss(rtn)
            figures[f"{QUANTIZATION}/{rtn}/{HELD_OUT_LOSS}"] = quantized
            figures[f"{QUANTIZATION}/{rtn}/absolute_error"] = quantized - loss
        figures |= self._output_errors(settings)
        return figures | {"probe_seconds": time.monotonic() - began_at}

    def _rounded_loss(self, spec: str) -> float:
        """Return the loss with weights rounded by a spec."""
        restore = self._engine.change_linears(
            lambda linear, weight_OI: self._rounding([spec], weight_OI, None, linear.name)[0]
        )
        loss = self._engine.evaluate(self._share)
        # Not in a `finally`: an error, perhaps of one rank alone, ends the run without a save.
        restore()
        return loss

    def _output_errors(self, settings: ProbeConfig) -> dict[str, float]:
        """Return output errors of some linears, each from the rank that has it."""
        errors = dict[str, float]()
        for name, record in self._engine.record_linears(self._sequences, self._linears).items():
            errors |= {
                f"{QUANTIZATION}/{spec}/output_error/{short_name(name)}": error
                for spec, error in output_errors(record, name, settings, self._rounding).items()
            }
        return {name: error for part in gathered(errors) for name, error in part.items()}


def output_errors(
    record: LinearRecord, name: str, settings: ProbeConfig, rounding: Rounding
) -> dict[str, float]:
    """Return |X (W - Wq)^T|^2 / |X W^T|^2 over the inputs X of a linear, by name of spec."""
    weight_OI, hessian_II = record.weight_OI, record.inputs.mean(name)
    specs = [spec for bits in settings.bits for spec in settings.specs(bits)]
    errors = {}
    for spec, rounded_OI in zip(specs, rounding(specs, weight_OI, hessian_II, name), strict=True):
        # In the dtype in which the engine keeps weights: that rounding counts, too.
        computed_OI = rounded_OI.to(weight_OI.dtype)
        error_O, norm_O = row_output_errors(weight_OI, computed_OI, hessian_II)
        error = error_O.sum()
        errors[spec] = float(error / norm_O.sum()) if error else 0.0  # 0 of a dead linear
    return errors
