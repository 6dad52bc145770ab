"""A quantized model in memory as a whole, for what needs transformers' own: downstream tasks."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from base.ranks import start
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import load_hf_model
from quant_eval.measuring.library import library_model
from quant_eval.measuring.sequential import check_groups
from quant_eval.measuring.texts import calibration_draw, open_text
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.families import ARCHITECTURES
from quant_eval.model.streamed import LAYERS, Block, StreamedModel
from quant_eval.settings import CalibrationSettings
from quant_eval.specs import QuantSpec


def quantized_model(
    hf_dir: Path, spec: QuantSpec, settings: CalibrationSettings
) -> PreTrainedModel:
    """Return the model with its decoder blocks quantized on the first calibration draw.

    Weights are dense, dequantized ones in the given dtype; for LLM.int8() the linears are
    bitsandbytes' own modules.
    """
    ranks = start(settings.device)
    whole: Any = load_hf_model(hf_dir, DTYPES[settings.dtype], "sdpa", ARCHITECTURES)
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[settings.dtype], ranks.device)
    check_groups(model, spec)
    corpus = open_text(settings.calibration, hf_dir, model.config.vocab_size)
    draw_NL = calibration_draw(corpus, settings, model, 0)
    layers = getattr(getattr(whole, model.family.decoder), LAYERS)

    def keep(index: int, block: Block) -> None:
        layers[index] = block.module

    with tempfile.TemporaryDirectory() as work:
        given, _ = library_model(hf_dir, spec, draw_NL, settings, Path(work) / "job", ranks)
        walk(model, [Variant(spec, draw_NL, given, finished=keep)], None, settings, ranks)
    return whole.to(ranks.device)  # type: ignore[no-any-return]
