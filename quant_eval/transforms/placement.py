"""The places of the transforms in a decoder block, and what an architecture does not allow.

Everything is computed as y = L Q_w(L^T W T) Q_a(T^-1 x), with a T per site and an L per linear, so
any T and L would be exact. But a rotation L of outputs is free in use only if the next linear's T
undoes it, with nothing in between that a rotation does not pass. Queries and keys pass rope and, on
some architectures, a norm, so no weights of theirs are rotated; values may be clipped, and the
residual stream passes norms: `places_of` refuses these. `measuring.walk` asks for the places of a
spec, `fitting` fits their transforms.

Shapes: D hidden features, F features of a head.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from base.errors import UserError
from quant_eval.sizes import (
    check_fused,
    check_rotation,
    duquant_block,
    head_features,
    site_widths,
)
from quant_eval.transforms.hadamard import hadamard_matrix, hadamard_steps
from quant_eval.transforms.steps import Transform
from train.model.families.family import Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from quant_eval.quantizer import QuantSpec


RESIDUAL_SIGNS = 0  # of QuaRot's R1, one for all blocks

Kind = Literal["none", "hadamard", "duquant"]
Signs = Literal["none", "own", "residual"]


@dataclass(frozen=True)
class Place:
    """One rotation of inputs or outputs.

    Attributes:
        width: features.
        kind: the matrix; "none" where nothing or another transform rotates.
        block: features that are rotated together; None: all.
        kept: the first features of every block, which are not rotated.
        signs: random signs before a Hadamard matrix: none, own ones of a block and site, or those
            of the residual stream, which all blocks share.
        folds_gain: whether the gain g of the norm before is folded, T = diag(g) Q: what is cast is
            then the normed input without its gain.
    """

    width: int
    kind: Kind = "none"
    block: int | None = None
    kept: int = 0
    signs: Signs = "none"
    folds_gain: bool = False


@dataclass(frozen=True)
class Places:
    """The rotations of a decoder block.

    Attributes:
        sites: of the inputs of the linears of each site.
        outputs: of the outputs of linears, by their names in the block; `output` builds them.
        head_rotation: [F, F], float64, of keys and queries after rope (R3) and of values (R2) in
            the cache; None where they are cached as they are.
    """

    sites: dict[str, Place]
    outputs: dict[str, Place] = field(default_factory=dict)
    head_rotation: Tensor | None = None

    def output(self, name: str) -> Transform | None:
        """Return L of a linear, by its name in the model, None if its outputs are not rotated."""
        place = self.outputs.get(name.rpartition(".")[2])
        if place is None:
            return None
        seed = (RESIDUAL_SIGNS,) if place.signs == "residual" else None
        return Transform(*hadamard_steps(place.width, place.block, seed, place.kept))


def places_of(spec: "QuantSpec", family: Family, config: "PretrainedConfig") -> Places:
    """Return the places of a spec's transforms in the blocks of a model.

    UserError if a width has no Hadamard matrix, or the architecture does not allow a rotation.
    """
    widths = site_widths(config)
    sites = {site: Place(width) for site, width in widths.items()}
    rotation, block = spec.rotation, spec.rotation_block
    check_rotation(spec, config)
    if rotation in ("quarot", "quarot-fused"):
        return _quarot(spec, sites, family, config)
    if rotation in ("had", "rhad"):
        signs: Signs = "own" if rotation == "rhad" else "none"
        sites = {
            site: replace(place, kind="hadamard", block=block, signs=signs)
            for site, place in sites.items()
        }
    if rotation == "duquant":
        sites = {
            site: replace(place, kind="duquant", block=duquant_block(place.width, block))
            for site, place in sites.items()
        }
    return Places(sites)


def _quarot(
    spec: "QuantSpec", sites: dict[str, Place], family: Family, config: "PretrainedConfig"
) -> Places:
    """Return QuaRot's places (arXiv:2404.00456).

    R1, with random signs, is one for the residual stream: in front of the reading linears, or fused
    into the linears that write and, with the norms' gains, into those that read. R2 is a Hadamard
    matrix on the values of each head, R4 one in front of the MLP's last linear, R3 one on queries
    and keys after rope. QuaRot's second online transform in front of the attention's last linear,
    across heads, is left out, as in SpinQuant (arXiv:2405.16406). With SmoothQuant's scales, which
    would come between the values and the inputs they mix to, R2 is on these inputs alone.
    """
    head = head_features(config)
    residual = replace(sites["attention_in"], kind="hadamard", signs="residual")

    # if nothing but the cache is rounded, nothing but R3 and R2 on cached keys and values is needed
    cached = hadamard_matrix(head) if spec.kv else None
    if not spec.rounds_linears:
        return Places(sites, head_rotation=cached)

    # R1 at the inputs, or fused, which rotates the outputs that it is fused into
    is_fused = spec.rotation == "quarot-fused"
    reading = replace(residual, folds_gain=is_fused)
    outputs = {} if spec.smooth is not None else {family.reading[-1]: _values(family, config)}
    if is_fused:
        outputs |= {family.writing: residual, family.mlp_writing: residual}
    # Clipping acts on single features, so it does not commute with a rotation.
    if family.reading[-1] in outputs and getattr(config, "clip_qkv", None) is not None:
        raise UserError(
            f"R2 cannot be fused on {config.model_type} with clip_qkv, which clips the values; give"
            " had"
        )
    if is_fused:
        check_fused(family, config.model_type)
    return Places(
        sites={
            "attention_in": reading,
            "attention_out": replace(sites["attention_out"], kind="hadamard", block=head),
            "mlp_in": reading,
            "mlp_out": replace(sites["mlp_out"], kind="hadamard"),
        },
        outputs=outputs,
        head_rotation=cached,
    )


def _values(family: Family, config: "PretrainedConfig") -> Place:
    """Return R2: a Hadamard matrix for the rows of each head's values.

    A linear that computes queries, keys and values has those of one head next to each other.
    """
    head = head_features(config)
    if len(family.reading) == 1:
        # In the 3 F rows of each head queries and keys come first; they are kept as they are.
        return Place(
            3 * config.num_attention_heads * head, "hadamard", block=3 * head, kept=2 * head
        )
    return Place(config.num_key_value_heads * head, "hadamard", block=head)
