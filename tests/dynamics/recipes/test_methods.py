"""Every spec of every recipe that trains has a place in the model that it trains."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dynamics.recipes import RECIPES, resolve
from quant_eval.measuring.sequential import check_spec
from quant_eval.model.families import family_of
from quant_eval.specs import parse_spec
from train.model.families import hf_settings
from train.run.config import RunConfig


class EmptyModel:
    """A model of a run without weights, as far as specs are checked against it."""

    def __init__(self, run: RunConfig) -> None:
        settings = hf_settings(run.model, run.data.sequence_length, 0) | {"num_hidden_layers": 1}
        self.config: Any = CONFIG_MAPPING[run.model.family](**settings)
        self.family = family_of(self.config)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config)

    def empty_linears(self) -> dict[str, nn.Linear]:
        named = self._model.named_modules()
        return {name: part for name, part in named if isinstance(part, nn.Linear) and ".0." in name}


@pytest.mark.parametrize("profile", ["full", "smoke"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_spec_has_a_place(recipe, profile):
    study = resolve(recipe, profile)
    models = {run.model: run for run in study.trained}
    for run in models.values():
        model: Any = EmptyModel(run)
        for spec in (*study.quantization.at_the_end, *study.quantization.by_block):
            check_spec(model, parse_spec(spec))
