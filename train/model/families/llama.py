"""Llama (arXiv 2302.13971), and Amber (arXiv 2312.06550) and Marin, whose models are of it."""

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


def _marin() -> Trajectory:
    """Return Marin 8B, of which the last checkpoint of each phase is published, under its name.

    The model card gives their tokens, rounded; the script gives the steps that the phases end at.
    From ocelot on the weights are moving averages of those of training, of 0.995 a step. The rate
    of kestrel cycles, and which rate its last checkpoint has is not documented.
    """
    small, wide, widest = (sequences * 4096 for sequences in (1024, 3072, 4096))
    batches = ((0, small), (660_000, wide), (1_320_000, widest))
    cooled = Curve(peak=1.7e-3, decay_from=740_500, decay_until=820_000, shape="linear", floor=0.1)
    reheated = Curve(
        peak=1.7e-3, decay_from=1_320_000, decay_until=1_400_000, shape="linear", floor=0.01
    )
    phases: tuple[tuple[str, int, str, Curve | None], ...] = (
        ("kestrel", 660_000, "WSD-S, peak 1e-3", None),
        ("ocelot", 740_500, "constant", cooled),
        ("jellyfish", 820_000, "linear to 10%", cooled),
        ("phoenix", 1_320_000, "warm-up, then constant", reheated),
        ("starling", 1_400_000, "linear to 1%", reheated),
        ("deeper-starling", 1_420_000, "constant at 1%", reheated),
    )
    stages, parent = list[Stage](), None
    for name, last, schedule, curve in phases:
        stages.append(
            Stage(
                name=name,
                template=name,
                parent=parent,
                schedule=schedule,
                source="marin-community/marin experiments/tootsie/exp600_tootsie.py,"
                " docs/reports/marin-8b-retro.md; model card",
                curve=curve,
                batches=batches,
                at_step=last,
            )
        )
        parent = name
    return Trajectory(
        repo="marin-community/marin-8b-base", stages=(*stages, stages[-1].as_main(1_420_000))
    )


LLAMA = Family(
    title="Llama",
    architecture="LlamaForCausalLM",
    training=Trainable(
        layer={**GATED_LINEARS, **NORMS_BEFORE},
        settings={"attention_bias": False, "mlp_bias": False},
        states_head_dim=True,
        megatron={**MEGATRON_LINEARS, **MEGATRON_NORMS_BEFORE},
    ),
    released=(_amber(), _marin()),
)
