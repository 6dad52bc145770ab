"""Apertus (arXiv 2509.14233): xIELU and no gate; queries and keys are normed head by head."""

from train.model.families.family import Family
from train.model.families.released import Curve, Stage, Trajectory, main


def _apertus() -> Trajectory:
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        schedule="WSD, 1-sqrt to 10%",
        source="swiss-ai/pretrain-code pretraining/submit_apertus_8b.sh",
        curve=Curve(
            peak=1.1e-4,
            warmup=4000,
            decay_from=2_429_920,
            decay_until=2_627_139,
            shape="sqrt",
            floor=0.1,
        ),
        batches=((0, 1024 * 4096), (1_678_000, 2048 * 4096)),
    )
    return Trajectory(repo="swiss-ai/Apertus-8B-2509", stages=(pretraining, main()))


APERTUS = Family(
    title="Apertus",
    architecture="ApertusForCausalLM",
    query_key_norm="heads",
    activation="xielu",
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    mlp_reading=("up_proj",),
    released=(_apertus(),),
)
