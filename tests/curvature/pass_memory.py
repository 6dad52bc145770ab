"""`python -m tests.curvature.pass_memory`: what passes through a model take, resident, and what
the simulation says.
"""

import json
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Olmo2Config

from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from curvature.cost.simulation import simulate
from curvature.products.exact import DualHessian, streamed
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings
from tests.curvature.process_memory import grown_by, return_what_is_freed

SEQUENCES, LENGTH, VOCABULARY, DEPTH = 2, 192, 1024, 3
REPEATS = 3
NOTHING = torch.zeros((), dtype=torch.float64)
PASSES = ((True, "bf16", False), (True, "bf16", True), (False, "fp32", True))


def main() -> None:
    """Bytes of each pass, measured and simulated."""
    return_what_is_freed()
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "eos_token_id": 0,
    }
    config = Olmo2Config(
        vocab_size=VOCABULARY, num_hidden_layers=DEPTH, max_position_embeddings=LENGTH, **shape
    )
    pairs = []
    for dual, dtype, checkpointing in PASSES:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        curved = CurvedModel(model, ranks=ALONE, dtype=DTYPES[dtype], checkpointing=checkpointing)

        def run(length: int, curved: CurvedModel = curved, dual: bool = dual) -> None:
            tokens_BS1 = torch.zeros(SEQUENCES, length + 1, dtype=torch.int64)
            if dual:
                DualHessian(curved).probed(tokens_BS1, Probe(0, 0))
            else:
                share = curved.loss(tokens_BS1).share
                streamed(curved.parameters, share, lambda *_: NOTHING)

        # What is allocated once and for all does not count: kernels keep buffers of the size they
        # were called with, 20 MB on a CPU that computes in bf16.
        run(LENGTH)
        # The least of some passes: what Python allocates of its own meanwhile only adds.
        measured = min(grown_by(partial(run, LENGTH)) for _ in range(REPEATS))
        settings = HutchinsonSettings(
            microbatch_sequences=SEQUENCES,
            dtype=dtype,  # type: ignore[arg-type]
            checkpointing=checkpointing,
        )
        pairs.append([measured, simulate(config, settings, LENGTH, dual=dual).bytes])
    print(json.dumps(pairs))


if __name__ == "__main__":
    main()
