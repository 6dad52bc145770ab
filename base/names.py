"""Names that somebody guessed: which one is meant, and which there are."""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_COLUMNS = 60  # of a list in a refusal
# Names of values and settings, and what other programs call them. Those of commands and options are
# beside them, in the __main__ of their folder.
SYNONYMS = {
    "cuda": "gpu nvidia",
    "bf16": "bfloat16",
    "fp32": "float32 float single",
    "fp16": "float16 half",
    "total_steps": "steps max_steps iterations train_steps",
    "peak_lr": "lr learning_rate max_lr",
    "weight_decay": "wd decay",
    "warmup_tokens": "warmup warmup_steps",
    "num_hidden_layers": "layers n_layers num_layers depth",
    "hidden_size": "width d_model hidden_dim",
    "num_attention_heads": "heads n_heads num_heads",
    "sequence_length": "seq_len seq_length context_length",
    "batch_size": "global_batch_size bs",
    "precision": "dtype",
}


def nearest(name: str, names: Iterable[str], synonyms: Mapping[str, str] = {}) -> str | None:
    """Return the one of `names` that a word most likely means; None where none is like it.

    The last part of a dotted name is a name as well.

    Args:
        name: the word.
        names: all that there are.
        synonyms: by name, words that other programs have for it, beside those of SYNONYMS.

    >>> nearest("peak_lr", ["seed", "optimizer.peak_lr"]), nearest("gpu", ["cpu", "cuda"])
    ('optimizer.peak_lr', 'cuda')
    >>> nearest("trace", ["hutchinson", "lanczos"], {"hutchinson": "trace diagonal"})
    'hutchinson'
    """
    whole: dict[str, str] = {}
    for each in names:
        for form in (_folded(each), _folded(each.rpartition(".")[2])):
            # Of names with the same form the first one keeps it.
            whole.setdefault(form, each)
    word = _folded(name)[:100]  # a comparison takes the product of the lengths
    tables = (*synonyms.items(), *SYNONYMS.items())
    meant = [key for key, words in tables if word in map(_folded, words.split())]
    # In this order: the word, its synonyms, and its last part after a dot.
    for guess in (word, *map(_folded, meant), word.rpartition(".")[2]):
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


def take_one_of(name: str, names: Iterable[str], synonyms: Mapping[str, str] = {}) -> str:
    """Return what to do about a name that is none of `names`, which are cut to a line.

    >>> take_one_of("tinny", ["olmo2-7b-lr", "tiny"])
    'did you mean tiny? Else take one of olmo2-7b-lr, tiny'
    >>> take_one_of("x", ["a", "b"])
    'take one of a, b'
    """
    names = list(dict.fromkeys(names))
    near = nearest(name, names, synonyms)
    listed = _listed(name, names, near)
    return f"did you mean {near}? Else take one of {listed}" if near else f"take one of {listed}"


def _listed(name: str, names: list[str], near: str | None) -> str:
    """Return the names; of more than a line has, those most like a name, and how many more."""
    whole = ", ".join(names)
    if len(whole) <= MOST_COLUMNS:
        return whole or "none, there are none"
    word = _folded(name)[:100]
    others = sorted(
        (each for each in names if each != near),
        key=lambda each: -difflib.SequenceMatcher(None, _folded(each), word).ratio(),
    )
    ends = itertools.accumulate(len(each) + 2 for each in others)
    shown = others[: max(1, sum(end <= MOST_COLUMNS for end in ends))]
    more = len(others) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
