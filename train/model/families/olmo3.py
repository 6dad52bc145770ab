"""Olmo 3 (arXiv 2512.13961): OLMo 2 with sliding windows in three of four layers.

The last of four sees all tokens before. In long context its rotary embedding alone is stretched, by
YaRN (arXiv 2309.00071).
"""

from train.model.families.family import Family
from train.model.families.released import B, Curve, Stage, T, Trajectory, averaged

SCRIPTS = "allenai/OLMo-core src/scripts/official/OLMo3"
REPORT = "arXiv 2512.13961"
MIDTRAINING_LR = 0.00020712352850360292


def _olmo3_7b() -> Trajectory:
    """Return the 7B: each of its stages starts from the last weights of the one before.

    Stage 1 follows a cosine over 5T tokens to its middle, and from there on the second half of one
    that ends at 7T. One epoch, 5.93T, ends it before.
    """
    peak, batch, last = 3e-4, 512 * 8192, 1_413_814
    short, long = int(5 * T) // batch, int(7 * T) // batch
    middle = short // 2 + 2000 // 2
    pretraining = Curve(
        peak=peak,
        warmup=2000,
        decay_until=short,
        shape="cosine",
        floor=0.1,
        known_until=middle,
        # so long a cosine that its middle is there, too
        then=Curve(
            peak=peak, decay_from=2 * middle - long, decay_until=long, shape="cosine", floor=0.1
        ),
    )
    stage1 = Stage(
        name="stage1",
        template="stage1-step{S}",
        schedule="cosine to 10% at 5T tokens, from its middle on slower, to 7T; stopped at 5.93T",
        source=f"{SCRIPTS}/OLMo-3-1025-7B-pretrain-{{1,2}}.py; {REPORT} Figure 3",
        curve=pretraining,
        batches=((0, batch),),
    )
    stage2 = _midtraining("7B", batch=2**21, steps=47_684, starts_at=last * batch)
    stage3 = _long_context(
        "7B",
        batch=64 * 65_536,
        tokens=50 * B,
        parent=stage2,
        starts_at=last * batch + 47_684 * 2**21,
    )
    return Trajectory(
        repo="allenai/Olmo-3-1025-7B", stages=(stage1, stage2, stage3, stage3.as_main(LAST))
    )


def _olmo3_32b() -> Trajectory:
    """Return the 32B, whose stage 3 starts from the average of two runs of stage 2.

    The branch main is the average of the last three checkpoints of stage 3.
    """
    batch, last = 1024 * 8192, 656_000
    stage1 = Stage(
        name="stage1",
        template="stage1-step{S}",
        schedule="cosine to 10% at 5.93T tokens, stopped at 5.5T",
        source=f"{SCRIPTS}/OLMo-3-1025-32B-pretrain.py; {REPORT} Figure 4",
        curve=Curve(
            peak=6e-4, warmup=2000, decay_until=5.93 * T / batch, shape="cosine", floor=0.1
        ),
        batches=((0, batch),),
    )
    runs = [
        _midtraining("32B", batch=2**22, steps=23_842, starts_at=last * batch, ingredient=number)
        for number in (1, 2)
    ]
    readme = f"{SCRIPTS}/README.md"
    soup = averaged(
        "stage2-ingredient1+2", tuple(run.line for run in runs), readme, (runs[0], 23_842)
    ).model_copy(update={"template": "stage2-ingredient1+2-step{S}"})
    stage3 = _long_context(
        "32B",
        batch=128 * 65_536,
        tokens=100 * B,
        parent=soup,
        starts_at=last * batch + 23_842 * 2**22,
    )
    main = averaged("main", ("stage3 at steps 10000, 11000 and 11921",), readme, (stage3, LAST))
    return Trajectory(repo="allenai/Olmo-3-1125-32B", stages=(stage1, *runs, soup, stage3, main))


LAST = 11_921  # step of stage 3 of both sizes


def _midtraining(
    size: str, *, batch: int, steps: int, starts_at: int, ingredient: int | None = None
) -> Stage:
    """Return stage 2, whose rate starts above that at which stage 1 ended."""
    run = "" if ingredient is None else f"-ingredient{ingredient}"
    return Stage(
        name="stage2",
        template=f"stage2{run}-step{{S}}",
        ingredient=ingredient,
        parent="stage1",
        schedule="linear to 0 over 100B tokens",
        source=f"{SCRIPTS}/OLMo-3-1025-{size}-midtrain{run.replace('ent', 'ent-')}.py",
        curve=Curve(peak=MIDTRAINING_LR, decay_until=steps, shape="linear"),
        batches=((0, batch),),
        starts_at=starts_at,
    )


def _long_context(size: str, *, batch: int, tokens: float, parent: Stage, starts_at: int) -> Stage:
    return Stage(
        name="stage3",
        template="stage3-step{S}",
        parent=parent.line,
        restarts=True,
        schedule=f"linear to 0 over {tokens / B:g}B tokens",
        source=f"{SCRIPTS}/OLMo-3-1025-{size}-long-context.py; {REPORT} Table 35",
        curve=Curve(peak=MIDTRAINING_LR, warmup=200, decay_until=LAST, shape="linear"),
        batches=((0, batch),),
        starts_at=starts_at,
    )


OLMO3 = Family(
    title="Olmo 3",
    architecture="Olmo3ForCausalLM",
    norms="after",
    query_key_norm="whole",
    windows="rotary_by_kind",
    attention_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
    released=(_olmo3_7b(), _olmo3_32b()),
)
