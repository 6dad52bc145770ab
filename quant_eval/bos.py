"""The token before a text, BOS, by one rule for losses, calibration and tasks.

With `template` a text begins as the model's own tokenizer begins it: what `tokenizer(text)` puts
before the text's tokens, nothing for many families (OLMo 2, Pythia, Qwen) and for a model without a
tokenizer. lm-evaluation-harness does the same with the questions of tasks. With `none` nothing is
put there.

A text is a document, or all of them where they are concatenated, and each calibration sequence.
Later windows of a long document continue it: they begin with nothing.

Shapes: T tokens of a text.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from ckpt_tools.hf.directory import TOKENIZER_FILES
from quant_eval.settings import Bos

ANY_TEXT = "a"


def bos_of(hf_dir: Path, rule: Bos) -> tuple[int, ...]:
    """Return the ids before a text: one, or none.

    Raises:
        UserError: the tokenizer cannot be loaded, does not show how a text begins, or puts several
            tokens there.
    """
    if rule == "none" or not any((hf_dir / name).exists() for name in TOKENIZER_FILES):
        return ()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_dir, local_files_only=True, trust_remote_code=False
        )
        text = tokenizer(ANY_TEXT, add_special_tokens=False)["input_ids"]
        whole = tokenizer(ANY_TEXT)["input_ids"]
    except Exception as error:  # noqa: BLE001  what it raises depends on the tokenizer
        reason = " ".join(str(error).split())
        raise UserError(
            f"{hf_dir}: its tokenizer, which says how texts begin, cannot be loaded"
            f" ({reason:.200}); copy the model's own there, or give --bos none"
        ) from None
    # Whatever precedes the tokens of the bare text is what the tokenizer puts there.
    starts = [start for start in range(len(whole)) if whole[start : start + len(text)] == text]
    if not text or not starts:
        raise UserError(
            f"{hf_dir}: its tokenizer makes {text} of the text {ANY_TEXT!r} and {whole} with what"
            " it puts before, so how texts begin is not known; give --bos none"
        )
    before = whole[: starts[0]]
    if len(before) > 1:
        raise UserError(
            f"{hf_dir}: its tokenizer begins a text with {len(before)} tokens, of which it is not"
            " known what predicts them; give --bos none"
        )
    return tuple(before)


def begun(text_T: NDArray[np.int64], bos: Sequence[int]) -> NDArray[np.int64]:
    """Return a text with BOS before it, unless it begins so already.

    Example:
        >>> begun(np.array([5, 6]), (1,)).tolist(), begun(np.array([1, 5]), (1,)).tolist()
        ([1, 5, 6], [1, 5])
    """
    if text_T[: len(bos)].tolist() == list(bos):
        return text_T
    return np.concatenate([np.array(bos, np.int64), text_T])
