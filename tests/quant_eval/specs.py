"""Names of specs as the class that rounding functions take, and roundings by them."""

import torch

from base.ranks import ALONE
from quant_eval.group import LinearGroup
from quant_eval.quantizer import ColumnSpec, GridSpec, QuantSpec
from quant_eval.quantizers.mixed import MixedSpec
from quant_eval.quantizers.qtip import QTIP
from quant_eval.rounding.gptq import Preparation, factored
from quant_eval.rounding.mixed import Mixed, kept_last, num_kept, round_mixed
from quant_eval.rounding.trellis import qtip
from quant_eval.specs import parse_spec


def typed[Spec: QuantSpec](kind: type[Spec], name: str) -> Spec:
    spec = parse_spec(name)
    assert isinstance(spec, kind), name
    return spec


def grid_spec(name: str) -> GridSpec:
    return typed(GridSpec, name)


def gptq_spec(name: str) -> ColumnSpec:
    return typed(ColumnSpec, name)


def mixed_spec(name: str) -> MixedSpec:
    return typed(MixedSpec, name)


def prepare_mixed(hessian_II: torch.Tensor, spec: MixedSpec) -> Preparation:
    count = num_kept(spec.kept, spec.group_size, len(hessian_II))
    order_I = kept_last(hessian_II.diagonal(), count)
    return factored(hessian_II, order_I, spec.damping, "layer", torch.float64, ALONE)


def mixed(
    weight_OI: torch.Tensor,
    hessian_II: torch.Tensor,
    spec: MixedSpec,
    prepared: Preparation | None = None,
) -> Mixed:
    """A weight rounded by Atom or QUIK."""
    count = num_kept(spec.kept, spec.group_size, weight_OI.shape[1])
    prepared = prepared or prepare_mixed(hessian_II, spec)
    return round_mixed(weight_OI, prepared, spec.columns, count, spec.kept_bits)


def by_qtip(weight_OI, hessian_II, spec: QTIP, seed, sizes=None) -> torch.Tensor:
    """A weight called w, or several linears of `sizes`, rounded by QTIP."""
    sizes = sizes or [len(weight_OI)]
    group = LinearGroup("w", sizes, weight_OI, hessian_II, torch.float64, ALONE, seed=tuple(seed))
    return qtip(group, spec.bits, spec.states, spec.damping)
