"""The engines by name."""

import torch

from train.engine import Engine
from train.run.config import RunConfig


def build_engine(run: RunConfig, device: torch.device) -> Engine:
    """Return the engine that run.json names, imported here: nothing else needs it installed."""
    if run.engine == "deepspeed":
        from train.deepspeed.engine import DeepSpeedEngine

        engine: Engine = DeepSpeedEngine(run, device)
        return engine
    from train.megatron.engine import MegatronEngine

    return MegatronEngine(run, device)
