"""The trajectories of OLMo (arXiv 2402.00838) to Olmo 3. See `registry`."""

import math
import re

from ckpt_tools.released.revisions import Family, Stage, averaged, line_of, main
from ckpt_tools.released.schedules import Curve

B, T = 1e9, 1e12  # tokens
OLMO2_PAPER, OLMO = "arXiv 2501.00656 Table 3", "allenai/OLMo configs"
CORE = "allenai/OLMo-core src/scripts/official/OLMo2"


def _olmo2(
    repo: str,
    *,
    batch: int,
    peak: float,
    warmup: int,
    horizon: float,
    stopped: int,
    stop_lr: float,
    anneals: dict[int, float],
    overrun: int = 10,
    sources: tuple[str, str],
    soup: tuple[int, ...] = (),
    soup_source: str = OLMO2_PAPER,
    templates: tuple[str, ...] = ("stage1-step{S}-tokens{T}",),
) -> Family:
    """Return an OLMo 2 with both stages.

    Stage 1 is a cosine to 10% at `horizon` tokens, which step `stopped` ends. Stage 2 is a linear
    anneal to 0 per ingredient, its steps counted from 0 again, which starts there at the rate that
    its configuration states: `stop_lr`, stage 1's last one, rounded. An anneal of
    `anneals[ingredient]` tokens has reached 0 at ceil(tokens / batch), and runs `overrun` steps
    longer. The branch main is the soup of these ingredients, else the last of them.
    """
    batches = ((0, batch),)
    seen, end = stopped * batch, f", stopped at {stopped * batch / T:.3g}T"
    cosine = Curve(peak=peak, warmup=warmup, decay_until=horizon / batch, shape="cosine", floor=0.1)
    stage1 = [
        Stage(
            name="stage1",
            template=template,
            schedule=f"cosine to 10% at {horizon / T:.3g}T tokens{end if seen < horizon else ''}",
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
            parent="stage1",
            schedule=f"linear to 0 over {tokens / B:g}B tokens",
            source=sources[1],
            curve=Curve(peak=stop_lr, decay_until=math.ceil(tokens / batch), shape="linear"),
            batches=batches,
            starts_at=seen,
        )
        for number, tokens in anneals.items()
    ]
    last_step = math.ceil(max(anneals.values()) / batch) + overrun
    lines = tuple(line_of("stage2", number) for number in soup)
    if lines:
        last = averaged("main", lines, soup_source, (stage2[0], last_step))
    else:
        last = stage2[-1].as_main(last_step)
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
    return Family(
        repo="allenai/OLMo-1B-hf",
        stages=(pretraining, main()),
        pattern=r"allenai/OLMo-1B(-hf)?",
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
    return Family(repo="allenai/OLMo-7B-hf", stages=stages, pattern=r"allenai/OLMo-7B(-hf)?")


def _olmo_2024(repo: str) -> Family:
    """Return an OLMo of April or July 2024, of which the names of revisions are known alone.

    Its card names revisions as step1000-tokens4B, its configuration has half of that batch.
    """
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        source="its model card; tokens by the names, rounded",
    )
    pattern = rf"{re.escape(repo.removesuffix('-hf'))}(-hf)?"
    return Family(repo=repo, stages=(pretraining, main()), pattern=pattern)


def _olmo3(repo: str) -> Family:
    """Return an Olmo 3, of which the names of stage 1 are known alone."""
    stage1 = Stage(name="stage1", template="stage1-step{S}", starts_at=None)
    return Family(repo=repo, stages=(stage1, main()))


OLMO_FAMILIES = (
    _olmo2(
        "allenai/OLMo-2-0425-1B",
        batch=512 * 4096,
        peak=4e-4,
        warmup=4000,
        horizon=5 * T,
        stopped=1_907_359,
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
        stopped=928_646,
        stop_lr=6.1499e-5,
        anneals=dict.fromkeys((1, 2, 3), 50 * B),
        sources=(
            f"{OLMO}/official-1124/OLMo2-7B-stage1.yaml",
            f"{OLMO}/official-1124/OLMo2-7B-stage2-seed{{42,42069,666}}.yaml",
        ),
        soup=(1, 2, 3),
        # Some early branches have no prefix.
        templates=("stage1-step{S}-tokens{T}", "step{S}-tokens{T}"),
    ),
    _olmo2(
        "allenai/OLMo-2-1124-13B",
        batch=2048 * 4096,
        peak=9e-4,
        warmup=1000,
        horizon=5 * T,
        stopped=596_057,
        stop_lr=9e-5,
        anneals=dict.fromkeys((1, 2, 3), 100 * B) | {4: 300 * B},
        sources=(  # OLMo2-13B-stage1.yaml says 3e-4, which is not what was run
            f"{OLMO2_PAPER}; allenai/OLMo scripts/beaker/peteish/peteish13-highlr.sh",
            f"{OLMO}/official-1124/OLMo2-13B-stage2-seed{{1110,2662,6209}}-{{100B,300B}}.yaml",
        ),
        soup=(1, 2, 3, 4),
    ),
    _olmo2(
        "allenai/OLMo-2-0325-32B",
        batch=2048 * 4096,
        peak=6e-4,
        warmup=2000,
        horizon=6.5 * T,
        stopped=721_901,
        stop_lr=6.6232e-5,
        anneals=dict.fromkeys((1, 2, 4), 100 * B) | {3: 300 * B},
        overrun=0,
        sources=(
            f"{CORE}/OLMo-2-0325-32B-train.py",
            f"{CORE}/OLMo-2-0325-32B-anneal.py; lengths by the last revision of each ingredient",
        ),
        soup=(1, 2, 3),
        soup_source=f"{CORE}/README.md",
    ),
    _olmo_1b(),
    _olmo_7b(),
    *(
        _olmo_2024(f"allenai/OLMo-{name}-hf")
        for name in ("7B-0424", "1.7-7B", "1B-0724", "7B-0724")
    ),
    _olmo3("allenai/Olmo-3-1025-7B"),
)
