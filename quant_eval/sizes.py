"""The sizes of a model that a spec needs, without torch: studies ask before anything is trained.

A measurement asks the same of the model at hand, before it begins (`measuring.sequential`).
"""

import math
from collections.abc import Mapping
from typing import Any

from base.errors import UserError
from quant_eval.formats import FORMATS
from quant_eval.quantizer import QuantSpec
from quant_eval.rotations import ROTATIONS
from train.model.families.family import Family

DUQUANT_BLOCK = 128  # as in arXiv:2406.01721
LARGEST = 256  # of the known Hadamard matrices
TILE = 16  # rows and columns of QTIP, so that one sequence is 256 weights
WITHOUT = "leave the rotation out"  # where no blocks fit
Linears = Mapping[str, tuple[int, int]]  # outputs and inputs, by name


def check_linears(spec: QuantSpec, linears: Linears) -> None:
    """Raise UserError for the first linear whose sizes a spec's rounding and casts do not fit."""
    for name, shape in linears.items():
        spec.check_sizes(name, shape)
        if spec.activations:
            check_cast(spec.activations, shape[1])


def check_cast(format: str, width: int) -> None:
    """Raise UserError where the groups of a format of activations do not divide their width."""
    row = FORMATS.get(format)  # type: ignore[call-overload]
    size = row.grouping if row else None
    if size and width % size:
        raise UserError(
            f"{format} casts groups of {size} features, which do not divide the {width} inputs of a"
            " linear; choose a format without groups, such as fp8"
        )


def check_tiles(width: int, name: str, bits: int) -> None:
    """Raise UserError for inputs or outputs, called `name`, without QTIP's tiles or a matrix."""
    advice = f"give another method, such as gptq-b{bits}-perchannel"
    if width % TILE:
        raise UserError(f"the {width} {name} are not a multiple of {TILE}; {advice}")
    if not hadamard_factors(width):
        raise UserError(f"no Hadamard matrix of size {width} is known, for the {name}; {advice}")


def site_widths(model: Any) -> dict[str, int]:
    """Return the input features of the linears of each site."""
    return {
        "attention_in": model.hidden_size,
        "attention_out": model.num_attention_heads * head_features(model),
        "mlp_in": model.hidden_size,
        "mlp_out": model.intermediate_size,
    }


def head_features(model: Any) -> int:
    """Return F, the features of an attention head."""
    head_dim = getattr(model, "head_dim", None)
    return int(head_dim or model.hidden_size // model.num_attention_heads)


def check_rotation(spec: QuantSpec, model: Any) -> None:
    """Raise UserError where the sizes of a model do not fit the rotation of a spec, if it has one.

    `model` is its configuration, of transformers or of a run, which name the sizes alike.
    """
    rotation, block, sites = spec.rotation, spec.rotation_block, site_widths(model)
    if rotation is None:
        return
    if rotation in ("quarot", "quarot-fused"):
        widths = {
            "hidden features": sites["attention_in"],
            "features of a head": head_features(model),
            "inputs of mlp_out": sites["mlp_out"],
        }
        check_hadamard(widths, None)
    elif rotation == "duquant":
        common = math.gcd(*sites.values())
        for site, width in sites.items():
            size = duquant_block(width, block)
            if width % size:
                fitting = [divisor for divisor in range(2, size + 1) if common % divisor == 0]
                advice = f"give a divisor, such as -duquant{fitting[-1]}" if fitting else WITHOUT
                raise UserError(
                    f"blocks of {size} do not divide the {width} inputs of {site}; {advice}"
                )
    elif rotation in ("had", "rhad") or ROTATIONS[rotation].is_learned:  # learned from rhad on
        check_hadamard({f"inputs of {site}": width for site, width in sites.items()}, block)


def check_fused(family: Family, model_type: str) -> None:
    """Raise UserError where the norms of an architecture do not pass a rotated residual stream."""
    reason = "LayerNorm subtracts the mean" if family.centers else ""
    reason = "its norms follow the linears" if family.norms == "after" else reason
    if reason:
        raise UserError(f"R1 cannot be fused on {model_type}: {reason}; give quarot")


def duquant_block(width: int, block: int | None) -> int:
    """Return the features that DuQuant rotates together; narrower inputs than 128 are one block."""
    return block or min(DUQUANT_BLOCK, width)


def check_hadamard(widths: Mapping[str, int], block: int | None) -> None:
    """Raise UserError for widths, of inputs by name, or blocks of them without a known matrix."""
    for name, width in widths.items():
        if width % (block or width):
            problem = f"blocks of {block} do not divide the {width} {name}"
        elif not hadamard_factors(block or width):
            problem = (
                f"no Hadamard matrix of size {block or width} is known, for the {width} {name}"
            )
        else:
            continue
        # One size of blocks has to divide the widths of all sites.
        common = math.gcd(*widths.values())
        sizes = [size for size in range(2, common + 1) if common % size == 0]
        known = [size for size in sizes if hadamard_factors(size)]
        advice = f"give blocks, such as -had{known[-1]}" if known else WITHOUT
        raise UserError(f"{problem}; {advice}")


def hadamard_factors(size: int) -> tuple[int, int] | None:
    """Return A >= B with A B = size of which there are known matrices, as equal as possible.

    >>> hadamard_factors(11008), hadamard_factors(6)
    ((172, 64), None)
    """
    products = [
        (size // right, right)
        for right in range(1, LARGEST + 1)
        if size % right == 0 and _is_known(right) and _is_known(size // right)
    ]
    # The least of the larger factors belongs to the most equal pair.
    return min((max(pair), min(pair)) for pair in products) if products else None


def _is_known(size: int) -> bool:
    return size in (1, 2) or (size % 4 == 0 and size <= LARGEST)
