"""SmolLM3: a Llama that leaves some blocks without rotary embedding."""

from train.model.families.family import (
    GATED_LINEARS,
    MEGATRON_LINEARS,
    MEGATRON_NORMS_BEFORE,
    NORMS_BEFORE,
    Family,
    Trainable,
)
from train.model.families.released import Curve, Stage, Trajectory, averaged

CARD = "model card of HuggingFaceTB/SmolLM3-3B-checkpoints"
SOURCES = f"huggingface/smollm text/pretraining/smollm3/*.yaml; {CARD}"


def _smollm3() -> tuple[Trajectory, Trajectory]:
    """Return the checkpoints of SmolLM3, and the final model.

    Steps count on through the three stages of pretraining. Context is extended in two stages, which
    count from 0, at the same tokens per step. The tokens of post-training are not documented.
    """
    per_step, decayed, extended = 2_359_296, 4_720_000, 20_000
    curve = Curve(
        peak=2e-4, warmup=2000, decay_from=4_198_001, decay_until=4_720_001, shape="linear"
    )
    stages = [
        Stage(
            name=f"stage{number}",
            template=f"stage{number}-step-{{S}}",
            parent=None if number == 1 else f"stage{number - 1}",
            schedule="WSD, linear to 0",
            source=SOURCES,
            curve=curve,
            batches=((0, per_step),),
        )
        for number in (1, 2, 3)
    ]
    stages += [
        Stage(
            name=name,
            template=f"{name}-step-{{S}}",
            parent=parent,
            restarts=True,
            schedule="cosine to 0",
            source=SOURCES,
            curve=Curve(peak=2e-5, warmup=1000, decay_until=1000 + decay_steps, shape="cosine"),
            batches=((0, per_step),),
            starts_at=steps_before * per_step,
        )
        for name, parent, steps_before, decay_steps in (
            ("lc-4k-to-32k", "stage3", decayed, 19_000),
            ("lc-32k-to-64k", "lc-4k-to-32k", decayed + extended, 21_000),
        )
    ]
    trained: dict[str, str | None] = {
        "it-mid-training": "lc-32k-to-64k",
        "it-SFT": "it-mid-training",
        "it-LC-expert": None,  # no source says what it was trained from
    }
    mid, sft, expert = (
        Stage(name=name, template=name, parent=parent, restarts=True, starts_at=None)
        for name, parent in trained.items()
    )
    apo = averaged("it-soup-APO", ("checkpoints of APO, which are not published",), CARD)
    stages += [mid, sft, apo, expert]
    merge = averaged(
        "main", ("0.9 of it-soup-APO", "0.1 of it-mid-training"), "arXiv 2510.06213, section 3.2"
    )
    final = "HuggingFaceTB/SmolLM3-3B"
    return (  # the checkpoints have no main, which is a repository of its own
        Trajectory(repo=f"{final}-checkpoints", stages=tuple(stages), part_of=final),
        Trajectory(repo=final, stages=(merge,)),
    )


SMOLLM3 = Family(
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    windows="one_rotary",
    training=Trainable(
        layer={**GATED_LINEARS, **NORMS_BEFORE},
        settings={
            **{"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
            "no_rope_layer_interval": 4,  # every fourth block
        },
        megatron={**MEGATRON_LINEARS, **MEGATRON_NORMS_BEFORE},
    ),
    released=_smollm3(),
)
