"""The one check of what another project's library made of a model, read off the result.

Every linear of the decoder blocks has to be on the grids that the library reports for it, those
have to be of the spec's bits, groups and symmetry, and everything else has to have the original's
bits. What this cannot see, such as damping that was raised, the libraries' own modules refuse.

Shapes: O output features, I input features, G groups of a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.configuration import by_kind
from ckpt_tools.hf.forward import names_in_files
from quant_eval.quantizers.libraries import LibrarySpec
from train.model.families import layer_kinds, window_of

# Steps of its grid between a weight and the one it was rounded from, for methods that do not move
# the error of one weight on to others: half by rounding, up to one by what AutoRound learns.
REACH = 2


@dataclass(frozen=True)
class ReportedGrid:
    """The points scale x (code - zero) of each group of a linear, as a library reports them.

    Attributes:
        scales_OG: of either sign.
        zeros_OG: the code of 0; codes are 0 to 2^bits - 1.
        groups_I: the group of each input feature; None: groups are of neighbours.
    """

    scales_OG: Tensor
    zeros_OG: Tensor
    groups_I: Tensor | None = None


Grids = dict[str, ReportedGrid]  # by linear


def check_alike(library: str, config: PretrainedConfig, length: int) -> None:
    """Raise UserError if layers need another mask or rotary embedding than the first.

    `library` computes every block with those that the first one was given. They are the same where
    `length`, the tokens of a sequence, is below the windows and no kind of layer has a rotary
    embedding of its own.
    """
    kinds = list(dict.fromkeys(layer_kinds(config)))
    rope = by_kind(getattr(config, "rope_parameters", None))
    windows = [window_of(config, kind) for kind in kinds]
    masked = any(window is not None and window <= length for window in windows)
    if len(kinds) > 1 and (masked or any(rope.get(each) != rope.get(kinds[0]) for each in kinds)):
        raise UserError(
            f"{library} gives every layer the mask and the rotary embedding of the first; those of"
            f" {' and '.join(kinds)} differ at {length} tokens of this {config.model_type}; give"
            " gptq, which is calibrated with each layer's own"
        )


def block_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linears of the decoder blocks by name, in order: those to be quantized."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def original_weights(
    hf_dir: Path, model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every parameter of a model as its directory has it, in `dtype`.

    One is in memory at a time. `model` gives the names, before the library works on it.
    """
    weights, files = HFWeights(hf_dir), names_in_files(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return (
        (name, read_whole(weights, files[name]).to(dtype).view(shape))
        for name, shape in shapes.items()
    )


def check_outcome(
    library: str,
    after: Mapping[str, Tensor],
    before: Iterator[tuple[str, Tensor]],
    grids: Grids,
    linears: Iterable[str],
    spec: LibrarySpec,
    *,
    moves_errors: bool,
) -> dict[str, Tensor]:
    """Return the weights of the linears, all on their grids, by the names of their parameters.

    Args:
        library: its name, for messages.
        after: every parameter of the model that the library left.
        before: every parameter of the original.
        grids: of each linear.
        linears: all that were to be quantized.
        spec: what the library was asked for.
        moves_errors: whether the method moves the error of one weight on to others, as GPTQ does.

    Raises:
        UserError: a linear was left out or is off its grid, a grid is not that of the spec or not
            of a linear, or another parameter is not the original's.
    """
    if missing := set(linears) - grids.keys():
        raise UserError(f"{library} left out {min(missing)}; use our own gptq")
    if strays := grids.keys() - set(linears):
        raise UserError(
            f"{library} made a grid of {min(strays)}, which is not a linear of a block; report it"
        )
    added, weights = set(after), dict[str, Tensor]()
    for key, original in before:
        name = key.removesuffix(".weight")
        value = after.get(key)
        added.discard(key)
        if value is None or value.dtype != original.dtype or value.shape != original.shape:
            raise UserError(f"{library} changed the dtype or shape of {key}; use our own gptq")
        value = value.detach().cpu().contiguous()
        if key == f"{name}.weight" and name in grids:
            source = None if moves_errors else original
            check_on_grid(library, name, value, grids[name], spec, source)
            weights[key] = value
        elif not torch.equal(value, original):
            raise UserError(f"{library} changed {key}, which is not a linear of a block; report it")
    if added:
        raise UserError(f"{library} added {min(added)}; report it")
    return weights


def check_on_grid(
    library: str,
    name: str,
    weight_OI: Tensor,
    grid: ReportedGrid,
    spec: LibrarySpec,
    source_OI: Tensor | None,
) -> None:
    """Refuse a weight that is not on the grid reported for it, or a grid that is not the spec's.

    `source_OI` is what it was rounded from, if every weight is a point near to its own.
    """
    if not bool(weight_OI.isfinite().all()):
        raise UserError(f"{library} made {name} not finite; check the checkpoint's weights")
    outputs, inputs = weight_OI.shape
    size = spec.group_size or inputs
    groups_I = torch.arange(inputs) // size if grid.groups_I is None else grid.groups_I.cpu()
    scales, zeros = grid.scales_OG.shape, grid.zeros_OG.shape
    # Groups may be of any inputs, but all of one size.
    is_right = bool((groups_I.bincount() == size).all())
    if {scales, zeros} != {(outputs, inputs // size)} or not is_right:
        raise UserError(
            f"{library} reports scales {list(scales)} and zeros {list(zeros)} for {name}"
            f" {list(weight_OI.shape)} instead of groups of {size} inputs; use our own gptq"
        )
    zeros_OG, highest = grid.zeros_OG.cpu().float(), 2**spec.bits - 1
    middle = 2 ** (spec.bits - 1)
    if spec.symmetric and not bool((zeros_OG == middle).all()):
        raise UserError(f"{library} took an asymmetric grid instead of a symmetric one for {name}")

    groups_I = groups_I.long()
    scale_OI, zero_OI = grid.scales_OG.cpu().float()[:, groups_I], zeros_OG[:, groups_I]
    quotient_OI = weight_OI.float() / scale_OI
    right_OI = torch.zeros_like(weight_OI, dtype=torch.bool)
    # The product of a step and its scale was rounded to the weight's dtype, once: in bf16 that
    # moves 255 steps by up to one, so either neighbour may be the step that it came from.
    for neighbour_OI in (quotient_OI.floor(), quotient_OI.ceil()):
        steps_OI = neighbour_OI.clamp(-zero_OI, highest - zero_OI)
        is_point_OI = (steps_OI * scale_OI).to(weight_OI.dtype) == weight_OI
        if source_OI is not None:
            exact_OI = (source_OI.float() / scale_OI).clamp(-zero_OI, highest - zero_OI)
            is_point_OI &= (steps_OI - exact_OI).abs() <= REACH
        right_OI |= is_point_OI
    if not bool(right_OI.all()):
        raise UserError(f"{library} left {name} off its grid; use our own gptq")
