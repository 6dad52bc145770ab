"""The one table of quantizers: a method is a file here and a row below.

The order of the rows is that of `python -m quant_eval methods`.
"""

from typing import Any

from pydantic.fields import FieldInfo

from quant_eval.quantizer import QuantSpec
from quant_eval.quantizers.bitsandbytes import NF4, Int8
from quant_eval.quantizers.gptq import GPTQ
from quant_eval.quantizers.hqq import HQQ
from quant_eval.quantizers.libraries import AWQ, GPTAQ, AutoRound, GPTQModel
from quant_eval.quantizers.mixed import QUIK, Atom
from quant_eval.quantizers.qtip import QTIP
from quant_eval.quantizers.rtn import RTN
from quant_eval.quantizers.unrounded import Unrounded

QUANTIZERS: tuple[type[QuantSpec], ...] = (
    RTN,
    GPTQ,
    Atom,
    QUIK,
    QTIP,
    HQQ,
    GPTQModel,
    GPTAQ,
    AWQ,
    AutoRound,
    Int8,
    NF4,
    Unrounded,
)
BY_METHOD = {quantizer.method: quantizer for quantizer in QUANTIZERS}

# The settings of all quantizers, by name.
SETTINGS: dict[str, FieldInfo] = {
    name: info for quantizer in QUANTIZERS for name, info in quantizer.model_fields.items()
} | QuantSpec.model_fields


def described(spec: QuantSpec) -> dict[str, Any]:
    """Return the settings of a spec as results hold them: None for those that it does not have."""
    return dict.fromkeys(SETTINGS) | spec.settings()
