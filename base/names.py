"""Names that somebody guessed: which one is meant, and which there are."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_LISTED = 16
# What other programs call something, and its names here: the first of them that there is.
SYNONYMS: dict[str, tuple[str, ...]] = {
    # commands
    **dict.fromkeys(("start", "launch", "begin", "execute"), ("run", "submit")),
    **dict.fromkeys(("resume", "continue", "restart"), ("retry", "run")),
    **dict.fromkeys(("quantize", "measure", "eval", "evaluate", "train", "new"), ("run",)),
    **dict.fromkeys(("tokenize", "preprocess", "prepare-data"), ("prepare",)),
    **dict.fromkeys(("check", "validate", "verify"), ("verify", "inspect", "doctor")),
    **dict.fromkeys(("info", "describe", "details"), ("show", "inspect", "status")),
    **dict.fromkeys(("trace", "traces", "hessian", "diagonal"), ("hutchinson",)),
    **dict.fromkeys(("eigenvalue", "eigenvalues", "sharpness", "lambda-max"), ("lanczos",)),
    **dict.fromkeys(("landscape", "surface", "plane"), ("slice",)),
    **dict.fromkeys(("trajectory", "components", "principal"), ("pca",)),
    **dict.fromkeys(("plot", "plots", "figures", "html"), ("report",)),
    **dict.fromkeys(("table", "results"), ("collect", "report")),
    **dict.fromkeys(("recipes", "ls", "studies"), ("list",)),
    **dict.fromkeys(("stop", "kill", "abort", "scancel"), ("cancel",)),
    **dict.fromkeys(("sbatch", "queue"), ("submit", "status")),
    **dict.fromkeys(("convert", "to-hf", "to_hf"), ("export",)),
    **dict.fromkeys(("from-hf", "from_hf", "load"), ("import",)),
    **dict.fromkeys(("merge", "soup", "ema", "lawa"), ("average",)),
    **dict.fromkeys(("upload", "push"), ("publish",)),
    **dict.fromkeys(("pull", "fetch", "get"), ("download",)),
    **dict.fromkeys(("diff", "test"), ("compare",)),
    **dict.fromkeys(("harness", "benchmark", "benchmarks", "lm-eval"), ("tasks",)),
    **dict.fromkeys(("mlflow", "track"), ("mirror",)),
    # values
    **dict.fromkeys(("gpu", "nvidia"), ("cuda",)),
    "bfloat16": ("bf16",),
    **dict.fromkeys(("float32", "float", "single"), ("fp32",)),
    **dict.fromkeys(("float16", "half"), ("fp16",)),
    # settings
    **dict.fromkeys(("steps", "max_steps", "iterations", "train_steps"), ("total_steps",)),
    **dict.fromkeys(("lr", "learning_rate", "max_lr"), ("peak_lr",)),
    **dict.fromkeys(("wd", "decay"), ("weight_decay",)),
    **dict.fromkeys(("warmup", "warmup_steps"), ("warmup_tokens",)),
    **dict.fromkeys(("layers", "n_layers", "num_layers", "depth"), ("num_hidden_layers",)),
    **dict.fromkeys(("width", "d_model", "hidden_dim"), ("hidden_size",)),
    **dict.fromkeys(("heads", "n_heads", "num_heads"), ("num_attention_heads",)),
    **dict.fromkeys(("seq_len", "seq_length", "context_length"), ("sequence_length",)),
    **dict.fromkeys(("global_batch_size", "bs"), ("batch_size",)),
    "dtype": ("precision",),
}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that a word most likely means; None where none is like it.

    The last part of a dotted name is a name as well.

    >>> nearest("peak_lr", ["seed", "optimizer.peak_lr"]), nearest("gpu", ["cpu", "cuda"])
    ('optimizer.peak_lr', 'cuda')
    """
    whole: dict[str, str] = {}
    for each in names:
        for form in (_folded(each), _folded(each.rpartition(".")[2])):
            # Of names with the same form the first one keeps it.
            whole.setdefault(form, each)
    word = _folded(name)[:100]  # a comparison takes the product of the lengths
    # In this order: the word, its synonyms, and its last part after a dot.
    guesses = (word, *map(_folded, SYNONYMS.get(name.lower(), ())), word.rpartition(".")[2])
    for guess in guesses:
        if guess in whole:
            return whole[guess]
    begun = {whole[form] for form in whole if word and form.startswith(word)}
    if len(begun) == 1:
        return begun.pop()
    close = difflib.get_close_matches(word, whole, n=2)
    scores = [difflib.SequenceMatcher(None, each, word).ratio() for each in close]
    is_clear = close and (len(close) == 1 or scores[0] > scores[1])  # stage3: stage1 or stage2?
    return whole[close[0]] if is_clear else None


def dotted_keys(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested content.

    >>> list(dotted_keys({"a": {"b": 1}}))
    ['a', 'a.b']
    """
    for key, value in content.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{prefix}{key}.")


def _folded(name: str) -> str:
    return re.sub(r"[-_ ]+", "-", name.strip("-").lower())


def take_one_of(name: str, names: Iterable[str]) -> str:
    """Return what to do about a name that is none of `names`: the nearest first, then all.

    >>> take_one_of("tinny", ["olmo2-7b-lr", "tiny"])
    'did you mean tiny? Else take one of olmo2-7b-lr, tiny'
    >>> take_one_of("x", ["a", "b"])
    'take one of a, b'
    """
    names = list(dict.fromkeys(names))
    listed = ", ".join(names[:MOST_LISTED]) or "none, there are none"
    if len(names) > MOST_LISTED:
        listed += f" and {len(names) - MOST_LISTED} more"
    near = nearest(name, names)
    return f"did you mean {near}? Else take one of {listed}" if near else f"take one of {listed}"
