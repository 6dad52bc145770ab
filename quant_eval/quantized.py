"""A quantized model in memory as a whole, for what needs transformers' own model: downstream tasks."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf_model import load_hf_model
from ckpt_tools.ranks import start
from quant_eval.families import ARCHITECTURES
from quant_eval.libraries.job import MODULES
from quant_eval.measurement import calibration_draws, library_model
from quant_eval.settings import CalibrationSettings, ComputeSettings
from quant_eval.specs import QuantSpec
from quant_eval.streamed import LAYERS, Block, StreamedModel
from quant_eval.texts import open_text
from quant_eval.walk import Variant, walk


def quantized_model(
    hf_dir: Path, spec: QuantSpec, calibration: CalibrationSettings, compute: ComputeSettings
) -> PreTrainedModel:
    """The model with its decoder blocks quantized on the first calibration draw.

    Weights are dense, dequantized ones in the given dtype; for LLM.int8() the linears are bitsandbytes' own modules.
    """
    ranks = start(compute.device)
    whole: Any = load_hf_model(hf_dir, DTYPES[compute.dtype], "sdpa", ARCHITECTURES)
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[compute.dtype], ranks.device)
    corpus = open_text(calibration.prefix, hf_dir, model.config.vocab_size)
    (draw_NL,) = calibration_draws(corpus, model, calibration.model_copy(update={"seeds": 1}))
    layers = getattr(getattr(whole, model.family.decoder), LAYERS)

    def keep(index: int, block: Block) -> None:
        layers[index] = block.module

    with tempfile.TemporaryDirectory(dir=compute.scratch) as work:
        given = None
        if spec.method in MODULES:
            given, _ = library_model(hf_dir, spec, draw_NL, compute, Path(work) / "job", ranks)
        walk(model, [Variant(spec, draw_NL, given, finished=keep)], None, compute, ranks)
    return whole.to(ranks.device)  # type: ignore[no-any-return]
