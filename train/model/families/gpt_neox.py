"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373), as transformers builds them.

LayerNorms, biases and one matrix for queries, keys and values; a quarter of each head rotates. The
MLP reads the residual stream before the attention writes to it (parallel), or after.
"""

import re

from train.model.families.family import Family, Size, Trainable
from train.model.families.released import Curve, Stage, Trajectory

PYTHIA_PEAKS = {
    **{"14m": 1e-3, "31m": 1e-3, "70m": 1e-3, "160m": 6e-4, "410m": 3e-4},
    **{"1b": 2.5e-4, "1.4b": 2e-4, "2.8b": 1.6e-4, "6.9b": 1.2e-4, "12b": 1.2e-4},
}


def _pythia(size: str) -> Trajectory:
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
    return Trajectory(
        repo=f"EleutherAI/pythia-{size}",
        stages=(pretraining, pretraining.as_main(horizon)),
        pattern=rf"EleutherAI/pythia-{re.escape(size)}(-deduped)?",
    )


# Shapes of the weights of the linears of a layer.
LINEARS: dict[str, tuple[Size, ...]] = {
    "attention.query_key_value": ("qkv", "hidden"),
    "attention.dense": ("hidden", "query"),
    "mlp.dense_h_to_4h": ("wide", "hidden"),
    "mlp.dense_4h_to_h": ("hidden", "wide"),
}
NORMS = ("input_layernorm", "post_attention_layernorm")

GPT_NEOX = Family(
    title="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    norm="layer",
    residual="configured",
    activation="gelu",
    rotates_parts=True,
    decoder="gpt_neox",
    embedding="embed_in",
    final_norm="final_layer_norm",
    attention="attention",
    reading=("query_key_value",),
    writing="dense",
    mlp_reading=("dense_h_to_4h",),
    mlp_writing="dense_4h_to_h",
    head_in_files="embed_out",
    older_keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    legacy_buffers=r"attention\.(masked_)?bias",  # the causal mask and the value it fills in
    training=Trainable(
        layer={**LINEARS, **dict.fromkeys(NORMS, ("hidden",))},
        biases=(*LINEARS, *NORMS, "final_layer_norm"),
        grouped_queries=False,
        settings={"attention_bias": True, "hidden_dropout": 0.0, "use_parallel_residual": True},
        norm_eps="layer_norm_eps",
        released={
            "vocab_size": 50_304,  # 50,277 tokens, padded
            "rope_theta": 10_000.0,
            "rotary_fraction": 0.25,
            "norm_eps": 1e-5,
        },
        sizes={
            "70M": {"hidden_size": 512, "layers": 6, "heads": 8, "intermediate_size": 2048},
            "160M": {"hidden_size": 768, "layers": 12, "heads": 12, "intermediate_size": 3072},
        },
    ),
    released=tuple(map(_pythia, PYTHIA_PEAKS)),
)
