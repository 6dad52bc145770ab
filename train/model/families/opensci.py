"""open-sci-ref (arXiv 2509.09009): a Llama with biases, and norms of queries and keys by head.

Its published code is never run: `ckpt_tools.hf.opensci` has modules that compute the same.
"""

from train.model.families.family import Family
from train.model.families.released import Curve, Stage, Trajectory, main

REPO = "open-sci/open-sci-ref-v0.01"
BATCH = 1008 * 4096  # 4.12M tokens, as Table 3 has it, rounded
SCHEDULES = {  # steps, warm-up and decay by the tokens in a repository's name
    "300B": (72_661, 25_000, 14_532),
    "1T": (242_204, 25_000, 48_440),
}


def _pretraining(tokens: str) -> Trajectory:
    """Return models of 4,096 tokens of context that were trained on so many tokens."""
    steps, warmup, decay = SCHEDULES[tokens]
    pretraining = Stage(
        name="pretraining",
        template="iter_{S:07}",
        schedule="WSD, linear to 0",
        source="laion.ai/blog/open-sci-ref-001, Table 3; arXiv 2509.09009",
        curve=Curve(
            peak=4e-3, warmup=warmup, decay_from=steps - decay, decay_until=steps, shape="linear"
        ),
        batches=((0, BATCH),),
        last=steps,  # models of 300B tokens may have had half of this batch, and twice the steps
    )
    return Trajectory(
        repo=f"{REPO}-SIZE-DATASET-{tokens}-4096",
        stages=(pretraining, pretraining.as_main(steps)),
        pattern=rf"open-sci/open-sci-ref-v0\.01-[0-9.]+b-[A-Za-z0-9._-]+-{tokens}-4096",
    )


def _others() -> Trajectory:
    """Return models whose schedule no source states, such as of 16,384 tokens of context."""
    pretraining = Stage(
        name="pretraining", template="iter_{S:07}", schedule="WSD", source="arXiv 2509.09009"
    )
    return Trajectory(
        repo=f"{REPO}-SIZE-DATASET-TOKENS-CONTEXT",
        stages=(pretraining, main()),
        pattern=r"open-sci/open-sci-ref-v0\.01-[0-9.]+b-[A-Za-z0-9._-]+",
    )


OPENSCI = Family(
    title="open-sci-ref",
    architecture="OpensciForCausalLM",
    spellings=("OpenSciForCausalLM",),  # the converter's default
    in_transformers=False,
    query_key_norm="heads",
    released=(*map(_pretraining, SCHEDULES), _others()),
)
