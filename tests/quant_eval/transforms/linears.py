"""A tiny model whose linears are replaced by y = L (L^T W T) (T^-1 x): nothing is rounded."""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quant_eval.casts.linear import CastLinear, shifted_bias
from quant_eval.model.streamed import Block
from quant_eval.transforms.fitting import fit_transform
from quant_eval.transforms.placement import Place, Places, places_of
from train.model.families import SITES, family_of


def load(directory) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rotated_mlp_inputs(rotation: str | None, width: int, block: int) -> Places:
    """The rotation that a spec names, of the inputs of the MLP alone; `block` is DuQuant's."""
    kinds = {
        None: Place(width),
        "had": Place(width, "hadamard"),
        "rhad": Place(width, "hadamard", signs="own"),
        "duquant": Place(width, "duquant", block=block),
    }
    return Places({"mlp_in": kinds[rotation]})


def tokens() -> torch.Tensor:
    return torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=tokens()).logits.double()


def difference(model, reference) -> float:
    """Largest difference of the logits, as a share of the largest logit."""
    return float((logits(model) - reference).abs().max() / reference.abs().max())


def blocks(model) -> list[Block]:
    family = family_of(model.config)
    decoder = getattr(model, family.decoder)
    return [
        Block(module, f"{family.decoder}.layers.{number}", family, is_parallel=False)
        for number, module in enumerate(decoder.layers)
    ]


@torch.no_grad()
def inputs_of(model) -> dict[str, torch.Tensor]:
    """Inputs of each linear of the blocks, as tokens [N, I]."""
    read, hooks = {}, []

    def keep(name, _, arguments):
        read[name] = arguments[0].flatten(0, -2).double()

    for block in blocks(model):
        for name, linear in (item for group in block.linears() for item in group.items()):
            hooks.append(linear.register_forward_pre_hook(partial(keep, name)))
    logits(model)
    for hook in hooks:
        hook.remove()
    return read


@torch.no_grad()
def transformed(model, read, spec) -> Any:
    """A copy of the model with every linear of its blocks transformed, in fp32.

    `read` are its linears' inputs.
    """
    family = family_of(model.config)
    places = places_of(spec, family, model.config)
    changed = copy.deepcopy(model)
    for number, block in enumerate(blocks(changed)):
        gains = {
            "attention_in": getattr(block.module, family.attention_norm),
            "mlp_in": getattr(block.module, family.mlp_norm),
        }
        for site, linears in zip(SITES, block.linears(), strict=True):
            x_NI = read[next(iter(linears))]
            stacked_OI = torch.cat([linear.weight for linear in linears.values()])
            mean_I = x_NI.mean(0)
            transform = fit_transform(
                spec,
                site,
                places,
                stacked_OI,
                seed=number,
                hessian_II=x_NI.T @ x_NI / len(x_NI),
                largest_I=(x_NI - mean_I if spec.shift else x_NI).abs().amax(0),
                mean_I=mean_I,
                gain_I=getattr(gains.get(site), "weight", None),
            )
            for name, linear in linears.items():
                output = places.output(name)
                weight_OI = transform.weight(linear.weight.double())
                if output is not None:
                    weight_OI = output.weight(weight_OI.T).T
                bias = shifted_bias(linear.weight, linear.bias, transform)
                replacement = CastLinear(weight_OI.float(), bias, transform, nn.Identity(), output)
                changed.set_submodule(name, replacement)
    return changed
