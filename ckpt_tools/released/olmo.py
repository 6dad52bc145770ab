"""The trajectories of OLMo 1 (arXiv 2402.00838) and OLMo 2 (arXiv 2501.00656). See `registry`."""

import math

from ckpt_tools.released.revisions import Family, Stage, main
from ckpt_tools.released.schedules import Curve

B, T = 1e9, 1e12  # tokens
OLMO2_PAPER, OLMO = "arXiv 2501.00656 Table 3", "allenai/OLMo configs"
OLMO2_1B_LAST_STEP = 23_852  # of every ingredient
CORE = "allenai/OLMo-core src/scripts/official/OLMo2/OLMo-2-0325-32B"


def _olmo2(
    repo: str,
    *,
    batch: int,
    peak: float,
    warmup: int,
    horizon: float,
    stopped: str,
    stop_lr: float,
    anneals: dict[int, float],
    sources: tuple[str, str],
    soup: str | None = None,
    templates: tuple[str, ...] = ("stage1-step{S}-tokens{T}",),
) -> Family:
    """Return an OLMo 2 with both stages.

    Stage 1 is a cosine to 10% at `horizon` tokens. Stage 2 is a linear anneal to 0 per ingredient,
    counted from 0 again, which starts at the rate that its configuration states: `stop_lr`, stage
    1's last one, rounded. An anneal of `anneals[ingredient]` tokens has reached 0 at
    ceil(tokens / batch) and may run ten steps longer. The branch main is the soup of ingredients,
    else the last of them.
    """
    batches = ((0, batch),)
    cosine = Curve(peak=peak, warmup=warmup, decay_until=horizon / batch, shape="cosine", floor=0.1)
    stage1 = [
        Stage(
            name="stage1",
            template=template,
            schedule=f"cosine to 10% at {horizon / T:.3g}T tokens{stopped}",
            source=sources[0],
            curve=cosine,
            batches=batches,
        )
        for template in templates
    ]
    stage2 = [
        Stage(
            name="stage2",
            template=f"stage2-ingredient{number}-step{{S}}-tokens{{T}}",
            ingredient=number,
            schedule=f"linear to 0 over {tokens / B:g}B tokens",
            source=sources[1],
            curve=Curve(peak=stop_lr, decay_until=math.ceil(tokens / batch), shape="linear"),
            batches=batches,
        )
        for number, tokens in anneals.items()
    ]
    last = main(soup, OLMO2_PAPER) if soup else stage2[-1].as_main(OLMO2_1B_LAST_STEP)
    return Family(repo=repo, stages=(*stage1, *stage2, last))


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
    )
    return Family(repo="allenai/OLMo-1B", stages=(pretraining, main()))


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
    return Family(repo="allenai/OLMo-7B", stages=stages)


OLMO_FAMILIES = (
    _olmo2(
        "allenai/OLMo-2-0425-1B",
        batch=512 * 4096,
        peak=4e-4,
        warmup=4000,
        horizon=5 * T,
        stopped=", stopped at 4T",
        stop_lr=7.4487e-5,
        anneals=dict.fromkeys((1, 2, 3), 50 * B),
        sources=(
            f"{OLMO}/official-0425/OLMo2-1B-stage1.yaml",
            f"{OLMO}/official-0425/OLMo2-1B-stage2-seed{{42069,666,42}}.yaml",
        ),
    ),
    _olmo2(
        "allenai/OLMo-2-1124-7B",
        batch=1024 * 4096,
        peak=3e-4,
        warmup=2000,
        horizon=5 * T,
        stopped=", stopped at 3.9T",
        stop_lr=6.1499e-5,
        anneals=dict.fromkeys((1, 2, 3), 50 * B),
        sources=(
            f"{OLMO}/official-1124/OLMo2-7B-stage1.yaml",
            f"{OLMO}/official-1124/OLMo2-7B-stage2-seed{{42,42069,666}}.yaml",
        ),
        soup="soup of ingredients 1 to 3",
        # Some early branches have no prefix.
        templates=("stage1-step{S}-tokens{T}", "step{S}-tokens{T}"),
    ),
    _olmo2(
        "allenai/OLMo-2-1124-13B",
        batch=2048 * 4096,
        peak=9e-4,
        warmup=1000,
        horizon=5 * T,
        stopped="",
        stop_lr=9e-5,
        anneals=dict.fromkeys((1, 2, 3), 100 * B) | {4: 300 * B},
        sources=(  # OLMo2-13B-stage1.yaml says 3e-4, which is not what was run
            f"{OLMO2_PAPER}; allenai/OLMo scripts/beaker/peteish/peteish13-highlr.sh",
            f"{OLMO}/official-1124/OLMo2-13B-stage2-seed{{1110,2662,6209}}-{{100B,300B}}.yaml",
        ),
        soup="soup of ingredients 1 to 4",
    ),
    _olmo2(
        "allenai/OLMo-2-0325-32B",
        batch=2048 * 4096,
        peak=6e-4,
        warmup=2000,
        horizon=6.5 * T,
        stopped=", stopped at 6.06T",
        stop_lr=6.6232e-5,
        anneals=dict.fromkeys((1, 2, 4), 100 * B) | {3: 300 * B},
        sources=(
            f"{CORE}-train.py",
            f"{CORE}-anneal.py; lengths by the last revision of each ingredient",
        ),
        soup="soup of stage 2",
    ),
    _olmo_1b(),
    _olmo_7b(),
)
