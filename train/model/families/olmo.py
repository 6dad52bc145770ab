"""OLMo (arXiv 2402.00838): norms without parameters; queries, keys and values may be clipped."""

import re

from train.model.families.family import GATED_LINEARS, Family, Trainable
from train.model.families.released import Curve, Stage, T, Trajectory, main

CONFIGS = "allenai/OLMo configs"


def _olmo_1b() -> Trajectory:
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        schedule="cosine to 10%",
        source=f"{CONFIGS}/official/OLMo-1B.yaml",
        curve=Curve(
            peak=4e-4, warmup=2000, warmup_from=0.1, decay_until=739_328, shape="cosine", floor=0.1
        ),
        batches=((0, 2048 * 2048),),
    )
    return Trajectory(
        repo="allenai/OLMo-1B-hf", stages=(pretraining, main()), pattern=r"allenai/OLMo-1B(-hf)?"
    )


def _olmo_7b() -> Trajectory:
    # The batch of arXiv 2402.00838. With the 2048 sequences of the configuration,
    # step452000-tokens2000B and step556000-tokens2460B would have seen 1896B and 2332B tokens.
    batch = 2160 * 2048
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        schedule="linear to 10% at 2T tokens, then unknown",
        source=f"{CONFIGS}/official/OLMo-7B.yaml; allenai/OLMo issue 608",
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
    return Trajectory(repo="allenai/OLMo-7B-hf", stages=stages, pattern=r"allenai/OLMo-7B(-hf)?")


def _olmo_2024(repo: str) -> Trajectory:
    """Return an OLMo of April or July 2024, of which the names of revisions are known alone.

    Its card names revisions as step1000-tokens4B, its configuration has half of that batch.
    """
    pretraining = Stage(
        name="pretraining",
        template="step{S}-tokens{T}",
        source="its model card; tokens by the names, rounded",
    )
    pattern = rf"{re.escape(repo.removesuffix('-hf'))}(-hf)?"
    return Trajectory(repo=repo, stages=(pretraining, main()), pattern=pattern)


OLMO = Family(
    title="OLMo",
    architecture="OlmoForCausalLM",
    norm="bare",
    training=Trainable(
        layer=GATED_LINEARS,
        settings={"attention_bias": False, "clip_qkv": None},
        norm_eps=1e-5,
    ),
    released=(
        _olmo_1b(),
        _olmo_7b(),
        *(
            _olmo_2024(f"allenai/OLMo-{name}-hf")
            for name in ("7B-0424", "1.7-7B", "1B-0724", "7B-0724")
        ),
    ),
)
