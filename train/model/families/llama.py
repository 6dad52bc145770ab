"""Llama (arXiv 2302.13971), and Amber (arXiv 2312.06550), whose models are of it."""

from train.model.families.family import (
    GATED_LINEARS,
    MEGATRON_LINEARS,
    MEGATRON_NORMS_BEFORE,
    NORMS_BEFORE,
    Family,
    Trainable,
)
from train.model.families.released import Curve, Stage, Trajectory, main


def _amber() -> Trajectory:
    chunk = 762
    pretraining = Stage(
        name="pretraining",
        template="ckpt_{K:03}",
        schedule="cosine to 10%",
        source="LLM360/amber-train main.py, run.sh",
        curve=Curve(peak=3e-4, warmup=2000, decay_until=360 * chunk, shape="cosine", floor=0.1),
        batches=((0, 2240 * 2048),),
        chunk_steps=chunk,
    )
    return Trajectory(repo="LLM360/Amber", stages=(pretraining, main()))


LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    training=Trainable(
        layer={**GATED_LINEARS, **NORMS_BEFORE},
        settings={"attention_bias": False, "mlp_bias": False},
        states_head_dim=True,
        megatron={**MEGATRON_LINEARS, **MEGATRON_NORMS_BEFORE},
    ),
    released=(_amber(),),
)
