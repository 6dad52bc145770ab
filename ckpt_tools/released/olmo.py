"""The trajectories of OLMo 1 (arXiv 2402.00838) and OLMo 2 (arXiv 2501.00656). See `registry`."""

import math

from ckpt_tools.released.revisions import Family, Stage, main
from ckpt_tools.released.schedules import Curve

B, T = 1e9, 1e12  # tokens
OLMO2_PAPER, OLMO = "arXiv 2501.00656 Table 3", "allenai/OLMo configs"
CORE = "allenai/OLMo-core src/scripts/official/OLMo2/OLMo-2-0325-32B"


def _olmo2(
    *,
    batch: int,
    curve: Curve,
    stopped: str,
    last_step: int,
    stop_lr: float,
    anneals: dict[int, tuple[float, int]],
    sources: tuple[str, str],
) -> tuple[Stage, ...]:
    """Both stages of an OLMo 2.

    Stage 1 is a cosine to 10%, left at `last_step`. Stage 2 is a linear anneal to 0 per ingredient,
    counted from 0 again, which starts at the rate that its configuration states: `stop_lr`, stage
    1's last one, rounded. An anneal of `anneals[ingredient]` = (tokens, last step) has reached 0 at
    ceil(tokens / batch) and may run ten steps longer.
    """
    batches = ((0, batch),)
    stage1 = Stage(
        name="stage1",
        template="stage1-step{S}-tokens{T}",
        schedule=f"cosine to 10% at {curve.decay_until * batch / T:.3g}T tokens{stopped}",
        source=sources[0],
        curve=curve,
        batches=batches,
        last_step=last_step,
    )
    stage2 = (
        Stage(
            name="stage2",
            template=f"stage2-ingredient{number}-step{{S}}-tokens{{T}}",
            ingredient=number,
            schedule=f"linear to 0 over {tokens / B:g}B tokens",
            source=sources[1],
            curve=Curve(peak=stop_lr, decay_until=math.ceil(tokens / batch), shape="linear"),
            batches=batches,
            last_step=last,
        )
        for number, (tokens, last) in anneals.items()
    )
    return stage1, *stage2


def _olmo2_1b() -> Family:
    batch = 512 * 4096
    stages = _olmo2(
        batch=batch,
        curve=Curve(peak=4e-4, warmup=4000, decay_until=5 * T / batch, shape="cosine", floor=0.1),
        stopped=", stopped at 4T",
        last_step=1_907_359,
        stop_lr=7.4487e-5,
        anneals=dict.fromkeys((1, 2, 3), (50 * B, 23_852)),
        sources=(
            f"{OLMO}/official-0425/OLMo2-1B-stage1.yaml",
            f"{OLMO}/official-0425/OLMo2-1B-stage2-seed{{42069,666,42}}.yaml",
        ),
    )
    main_branch = stages[3].as_main(23_852)  # ingredient 3, no soup
    return Family(
        repo="allenai/OLMo-2-0425-1B",
        example="stage1-step40000-tokens84B",
        stages=(*stages, main_branch),
    )


def _olmo2_7b() -> Family:
    batch = 1024 * 4096
    stages = _olmo2(
        batch=batch,
        curve=Curve(peak=3e-4, warmup=2000, decay_until=5 * T / batch, shape="cosine", floor=0.1),
        stopped=", stopped at 3.9T",
        last_step=928_646,
        stop_lr=6.1499e-5,
        anneals=dict.fromkeys((1, 2, 3), (50 * B, 11_931)),
        sources=(
            f"{OLMO}/official-1124/OLMo2-7B-stage1.yaml",
            f"{OLMO}/official-1124/OLMo2-7B-stage2-seed{{42,42069,666}}.yaml",
        ),
    )
    early = stages[0].model_copy(
        update={"template": "step{S}-tokens{T}"}
    )  # some early branches have no prefix
    soup = main("soup of ingredients 1 to 3", OLMO2_PAPER)
    return Family(
        repo="allenai/OLMo-2-1124-7B",
        example="stage1-step55000-tokens231B",
        stages=(*stages, early, soup),
    )


def _olmo2_13b() -> Family:
    batch = 2048 * 4096
    stages = _olmo2(
        batch=batch,
        curve=Curve(peak=9e-4, warmup=1000, decay_until=5 * T / batch, shape="cosine", floor=0.1),
        stopped="",
        last_step=596_057,
        stop_lr=9e-5,
        anneals=dict.fromkeys((1, 2, 3), (100 * B, 11_931)) | {4: (300 * B, 35_773)},
        sources=(  # OLMo2-13B-stage1.yaml says 3e-4, which is not what was run
            f"{OLMO2_PAPER}; allenai/OLMo scripts/beaker/peteish/peteish13-highlr.sh",
            f"{OLMO}/official-1124/OLMo2-13B-stage2-seed{{1110,2662,6209}}-{{100B,300B}}.yaml",
        ),
    )
    soup = main("soup of ingredients 1 to 4", OLMO2_PAPER)
    return Family(
        repo="allenai/OLMo-2-1124-13B",
        example="stage1-step78000-tokens655B",
        stages=(*stages, soup),
    )


def _olmo2_32b() -> Family:
    batch = 2048 * 4096
    stages = _olmo2(
        batch=batch,
        curve=Curve(peak=6e-4, warmup=2000, decay_until=6.5 * T / batch, shape="cosine", floor=0.1),
        stopped=", stopped at 6.06T",
        last_step=721_901,
        stop_lr=6.6232e-5,
        anneals={
            1: (100 * B, 11_921),
            2: (100 * B, 11_921),
            3: (300 * B, 35_763),
            4: (100 * B, 11_921),
        },
        sources=(
            f"{CORE}-train.py",
            f"{CORE}-anneal.py; lengths by the last revision of each ingredient",
        ),
    )
    soup = main("soup of stage 2", OLMO2_PAPER)
    return Family(
        repo="allenai/OLMo-2-0325-32B",
        example="stage1-step54000-tokens453B",
        stages=(*stages, soup),
    )


def _olmo_1b() -> Family:
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        schedule="cosine to 10%",
        source=f"{OLMO}/official/OLMo-1B.yaml",
        curve=Curve(
            peak=4e-4, warmup=2000, warmup_from=0.1, decay_until=739_328, shape="cosine", floor=0.1
        ),
        batches=((0, 2048 * 2048),),
        last_step=739_328,
    )
    return Family(
        repo="allenai/OLMo-1B", example="step738020-tokens3095B", stages=(pretraining, main())
    )


def _olmo_7b() -> Family:
    # The batch of arXiv 2402.00838. With the 2048 sequences of the configuration,
    # step452000-tokens2000B and step556000-tokens2460B would have seen 1896B and 2332B tokens.
    batch = 2160 * 2048
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        schedule="linear to 10% at 2T tokens, then unknown",
        source=f"{OLMO}/official/OLMo-7B.yaml; allenai/OLMo issue 608",
        curve=Curve(
            peak=3e-4,
            warmup=5000,
            warmup_from=0.1,
            decay_until=2 * T / batch,
            shape="linear",
            floor=0.1,
            known_until=2 * T / batch,
        ),
        batches=((0, batch),),
        last_step=557_000,
    )
    annealed = pretraining.model_copy(
        update={
            "schedule": "linear to 0 over the last 1000 steps",
            "source": "discussion 15 of allenai/OLMo-7B",
            "curve": Curve(
                peak=0.0, decay_until=557_000, shape="linear"
            ),  # its start is not known, its end is 0
        }
    )
    stages = (pretraining, annealed.as_main(557_000))
    return Family(repo="allenai/OLMo-7B", example="step556000-tokens2460B", stages=stages)


OLMO_FAMILIES = (_olmo2_1b(), _olmo2_7b(), _olmo2_13b(), _olmo2_32b(), _olmo_1b(), _olmo_7b())
