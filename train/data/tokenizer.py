"""The tokenizer of an HF directory."""

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from base.errors import UserError
from base.files import check_fetched
from base.reading import read_json

TOKENIZER_JSON = "tokenizer.json"


def load_tokenizer(directory: Path) -> tuple[Tokenizer, int]:
    """Return the tokenizer of an HF directory and the id of its end-of-text token.

    It neither truncates nor pads, whatever its file says: a document loses and gains no token.
    Special tokens typed in a text are read as such, unless `encode_special_tokens` is set.

    Raises:
        UserError: no tokenizer, a damaged one, or one that draws its tokens at random.
    """
    path, config_path = directory / TOKENIZER_JSON, directory / "tokenizer_config.json"
    if not path.is_file() or not config_path.is_file():
        raise UserError(
            f"{directory} holds no {TOKENIZER_JSON} or {config_path.name}; give a tokenizer's"
            " directory"
        )
    check_fetched(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # nothing narrower, and a panic of its Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{path} is damaged ({error}); copy the tokenizer again") from None
    eos_token = _eos_token(config_path)
    eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if eos_token is None or eos_token_id is None:
        raise UserError(
            f"{config_path} names no eos_token of the vocabulary, which ends documents; correct it"
        )
    if getattr(tokenizer.model, "dropout", None):  # of a BPE: merges that are left out
        raise UserError(
            f"{path} has a dropout of {tokenizer.model.dropout}: a text would have other tokens"
            " every time; set it to null"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_added_tokens_decoder().get(eos_token_id)
    if known is None or not known.special:  # transformers, too, makes it one
        tokenizer.add_special_tokens([AddedToken(eos_token, special=True, normalized=False)])
    return tokenizer, eos_token_id


def _eos_token(config_path: Path) -> str | None:
    """Return the end-of-text token that a tokenizer_config.json names, if it names one."""
    try:
        eos_token = read_json(config_path).get("eos_token")
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        return eos_token.encode().decode() if isinstance(eos_token, str) else None
    except (ValueError, AttributeError) as error:  # half a surrogate pair is a ValueError, too
        raise UserError(f"{config_path} is damaged ({error}); copy the tokenizer again") from None


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id and one: there may be fewer tokens, as ids may have holes."""
    return max(tokenizer.get_vocab().values()) + 1


def special_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of the special tokens as they can be typed in a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    # The longest first: an alternation takes the first that fits.
    contents = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))
