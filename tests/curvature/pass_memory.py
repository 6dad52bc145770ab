"""`python -m tests.curvature.pass_memory`: what passes through a model take, resident, and what
the simulation says.

Started with MALLOC_MMAP_THRESHOLD_=65536, so that what is freed leaves the process at once and no
arena's gaps count.
"""

import ctypes
import gc
import json
from pathlib import Path
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
from tests.curvature.streaming_memory import resident

SEQUENCES, LENGTH, VOCABULARY, DEPTH = 4, 192, 1024, 3
NOTHING = torch.zeros((), dtype=torch.float64)
PASSES = ((True, "bf16", False), (True, "bf16", True), (False, "fp32", True))


def main() -> None:
    """Bytes of each pass, measured and simulated."""
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

        # What is allocated once and for all, such as buffers of the kernels, does not count. In
        # bf16, which few CPUs compute in, a short pass has to do.
        run(8 if dtype == "bf16" else LENGTH)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or the pass would grow into pages that are free already
        Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
        before = resident("VmRSS")
        run(LENGTH)
        measured = resident("VmHWM") - before
        settings = HutchinsonSettings(
            microbatch_sequences=SEQUENCES,
            dtype=dtype,  # type: ignore[arg-type]
            checkpointing=checkpointing,
        )
        pairs.append([measured, simulate(config, settings, LENGTH, dual=dual).bytes])
    print(json.dumps(pairs))


if __name__ == "__main__":
    main()
