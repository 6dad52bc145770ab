"""The engines by name."""

from typing import assert_never

import torch

from train.engine import Engine
from train.run.config import RunConfig


def build_engine(run: RunConfig, device: torch.device) -> Engine:
    """Return the engine that run.json names, imported here: nothing else needs it installed."""
    match run.engine:
        case "deepspeed":
            from train.deepspeed.engine import DeepSpeedEngine

            engine: Engine = DeepSpeedEngine(run, device)
            return engine
        case "megatron":
            from train.megatron.engine import MegatronEngine

            return MegatronEngine(run, device)
        case _:
            assert_never(run.engine)
