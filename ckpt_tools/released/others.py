"""The trajectories of SmolLM3, Apertus, open-sci, Amber and Pythia. See `registry`."""

import re

from ckpt_tools.released.revisions import Family, Stage, averaged, main
from ckpt_tools.released.schedules import Curve

CARD = "model card of HuggingFaceTB/SmolLM3-3B-checkpoints"
SMOLLM3 = f"huggingface/smollm text/pretraining/smollm3/*.yaml; {CARD}"
PYTHIA_PEAKS = {
    **{"14m": 1e-3, "31m": 1e-3, "70m": 1e-3, "160m": 6e-4, "410m": 3e-4},
    **{"1b": 2.5e-4, "1.4b": 2e-4, "2.8b": 1.6e-4, "6.9b": 1.2e-4, "12b": 1.2e-4},
}


def _smollm3() -> tuple[Family, Family]:
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
            source=SMOLLM3,
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
            source=SMOLLM3,
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
        "main",
        ("0.9 of it-soup-APO", "0.1 of it-mid-training"),
        "arXiv 2510.06213, section 3.2",
    )
    return (  # the checkpoints have no main, which is a repository of its own
        Family(repo="HuggingFaceTB/SmolLM3-3B-checkpoints", stages=tuple(stages)),
        Family(repo="HuggingFaceTB/SmolLM3-3B", stages=(merge,)),
    )


def _apertus() -> Family:
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
    return Family(repo="swiss-ai/Apertus-8B-2509", stages=(pretraining, main()))


def _open_sci() -> Family:
    pretraining = Stage(
        name="pretraining", template="iter_{S:07}", schedule="WSD", source="arXiv 2509.09009"
    )
    return Family(
        repo="open-sci/open-sci-ref-v0.01-SIZE-DATASET-TOKENS-CONTEXT",
        stages=(pretraining, main()),
        pattern=r"open-sci/open-sci-ref-v0\.01-[0-9.]+b-[A-Za-z0-9._-]+",
    )


def _amber() -> Family:
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
    return Family(repo="LLM360/Amber", stages=(pretraining, main()))


def _pythia(size: str) -> Family:
    """Return a size of Pythia, trained on either data set.

    GPT-NeoX let the cosine fall to 0 at warm-up + horizon and cut it off at the minimum, 10% of the
    peak, so that the last fifth of training has a constant rate. Pull request 1008 changed that in
    August 2023 and says that Pythia was trained before.
    """
    horizon = 143_000
    warmup = horizon // 100
    pretraining = Stage(
        name="pretraining",
        template="step{S}",
        schedule="cosine to 0, cut off at 10%",
        source=(
            f"EleutherAI/pythia models/*/pythia-{size}.yml; EleutherAI/gpt-neox pull request 1008"
        ),
        curve=Curve(
            peak=PYTHIA_PEAKS[size],
            warmup=warmup,
            decay_until=warmup + horizon,
            shape="cosine",
            least=0.1,
        ),
        batches=((0, 1024 * 2048),),
    )
    return Family(
        repo=f"EleutherAI/pythia-{size}",
        stages=(pretraining, pretraining.as_main(horizon)),
        pattern=rf"EleutherAI/pythia-{re.escape(size)}(-deduped)?",
    )


OTHER_FAMILIES = (*_smollm3(), _apertus(), _open_sci(), _amber(), *map(_pythia, PYTHIA_PEAKS))
