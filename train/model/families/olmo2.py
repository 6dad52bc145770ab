"""OLMo 2 (arXiv 2501.00656; allenai/OLMo, configs/official-*): the family that runs train first.

Its norms are after attention and MLP, queries and keys are normed over all heads at once. The
ladder of small models is allenai/OLMo-core's.
"""

import math

from train.model.families.family import (
    GATED_LINEARS,
    MEGATRON_LINEARS,
    Family,
    MegatronParameter,
    Trainable,
)
from train.model.families.released import B, Curve, Stage, T, Trajectory, averaged, line_of

PAPER, CONFIGS = "arXiv 2501.00656 Table 3", "allenai/OLMo configs"
CORE = "allenai/OLMo-core src/scripts/official/OLMo2"


def ladder_intermediate_size(hidden_size: int) -> int:
    """Return the MLP width of OLMo-core's ladder: 1.5 x 8/3 hidden, up to a multiple of 256.

    Example:
        >>> ladder_intermediate_size(768)
        3072
    """
    width = int(1.5 * (8 * hidden_size // 3))
    return -(-width // 256) * 256


SIZES = {
    # 8/3 hidden, up to a multiple of 256
    "30M": {"hidden_size": 256, "layers": 4, "heads": 8, "intermediate_size": 768},
    "190M": {
        **{"hidden_size": 768, "layers": 12, "heads": 12},
        "intermediate_size": ladder_intermediate_size(768),
    },
    "1B": {"hidden_size": 2048, "layers": 16, "heads": 16, "intermediate_size": 8192},
    "7B": {"hidden_size": 4096, "layers": 32, "heads": 32, "intermediate_size": 11008},
    "13B": {"hidden_size": 5120, "layers": 40, "heads": 40, "intermediate_size": 13824},
    "32B": {
        **{"hidden_size": 5120, "layers": 64, "heads": 40, "intermediate_size": 27648},
        "key_value_heads": 8,
    },
}

MEGATRON = {
    **MEGATRON_LINEARS,
    "self_attention.q_layernorm.weight": MegatronParameter(
        ("self_attn.q_norm.weight",), shard_axis=0
    ),
    "self_attention.k_layernorm.weight": MegatronParameter(
        ("self_attn.k_norm.weight",), shard_axis=0
    ),
    "self_attention.linear_proj.post_norm.weight": MegatronParameter(
        ("post_attention_layernorm.weight",)
    ),
    "mlp.linear_fc2.post_norm.weight": MegatronParameter(("post_feedforward_layernorm.weight",)),
}


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
    soup_source: str = PAPER,
    templates: tuple[str, ...] = ("stage1-step{S}-tokens{T}",),
) -> Trajectory:
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
    return Trajectory(repo=repo, stages=(*stage1, *stage2, last))


RELEASED = (
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
            f"{CONFIGS}/official-0425/OLMo2-1B-stage1.yaml",
            f"{CONFIGS}/official-0425/OLMo2-1B-stage2-seed{{42069,666,42}}.yaml",
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
            f"{CONFIGS}/official-1124/OLMo2-7B-stage1.yaml",
            f"{CONFIGS}/official-1124/OLMo2-7B-stage2-seed{{42,42069,666}}.yaml",
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
            f"{PAPER}; allenai/OLMo scripts/beaker/peteish/peteish13-highlr.sh",
            f"{CONFIGS}/official-1124/OLMo2-13B-stage2-seed{{1110,2662,6209}}-{{100B,300B}}.yaml",
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
)

OLMO2 = Family(
    title="OLMo2",
    architecture="Olmo2ForCausalLM",
    norms="after",
    query_key_norm="whole",
    attention_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
    training=Trainable(
        layer={
            **GATED_LINEARS,
            "self_attn.q_norm": ("hidden",),
            "self_attn.k_norm": ("key_value",),
            "post_attention_layernorm": ("hidden",),
            "post_feedforward_layernorm": ("hidden",),
        },
        settings={"attention_bias": False},
        initializer="truncated_normal",
        released={"vocab_size": 100_352},  # 100,278 tokens, padded; all else is ModelConfig's
        sizes=SIZES,
        megatron=MEGATRON,
    ),
    released=RELEASED,
)
