"""Saved checkpoints in vLLM, where it is installed: the loss of texts of random tokens."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.gpu.figures import CheckedFigure, SkippedError
from tests.gpu.workbench import Workbench, hf_model, random_tokens

# vLLM rounds scales to bf16 and sums in another order; a zero, a scale or an order that is not
# understood changes the loss of random weights by a tenth or more
MOST = 0.01
SPECS = ("rtn-b4-g128", "rtn-b4-perchannel", "w8a8", "fp8", "fp8-astatic", "kvfp8")


def in_vllm(workbench: Workbench) -> list[CheckedFigure]:
    """The loss that vLLM computes with a saved checkpoint, against that of the saved model."""
    if not find_spec("vllm"):
        raise SkippedError("vLLM is not installed; it would need a GPU")
    from tests.quant_eval.saved.examples import save_measured

    sizes = workbench.sizes
    directory = hf_model(workbench.work / "model", sizes.compared, sizes.compared_length)
    ids_NL = random_tokens(8, sizes.compared_length // 2, sizes.compared.vocab_size)
    figures = []
    for spec in SPECS:
        measured = save_measured(directory, workbench.work / spec, spec, "bf16")
        model: Any = measured.model
        model.to(workbench.device)
        with torch.no_grad():
            logits = (
                model(input_ids=ids_NL.to(workbench.device), use_cache=False).logits.float().cpu()
            )
        expected = float(cross_entropy(logits[:, :-1].flatten(0, 1), ids_NL[:, 1:].flatten()))
        del model
        difference = abs(_loss(measured.out, ids_NL.tolist(), spec == "kvfp8") / expected - 1)
        figures.append(CheckedFigure(f"{spec} in vLLM: loss", difference, "relative", most=MOST))
    return figures


def _loss(checkpoint: Path, ids: list[list[int]], has_fp8_cache: bool) -> float:
    """Mean cross-entropy of the tokens after the first, in nats."""
    import vllm

    engine: Any = vllm.LLM(
        str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_dtype="fp8" if has_fp8_cache else "auto",
        skip_tokenizer_init=True,
    )
    wanted = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": sequence} for sequence in ids]
    losses = [
        -logprobs[token].logprob
        for sequence, result in zip(ids, engine.generate(prompts, wanted), strict=True)
        for token, logprobs in zip(sequence[1:], result.prompt_logprobs[1:], strict=True)
    ]
    return sum(losses) / len(losses)
