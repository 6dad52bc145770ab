"""The tokenizer of an HF directory."""

from pathlib import Path

from tokenizers import Tokenizer

from base.errors import UserError
from base.files import read_json

TOKENIZER_JSON = "tokenizer.json"


def load_tokenizer(directory: Path) -> tuple[Tokenizer, int]:
    """Return the tokenizer of an HF directory and the id of its end-of-text token."""
    path, config_path = directory / TOKENIZER_JSON, directory / "tokenizer_config.json"
    if not path.is_file() or not config_path.is_file():
        raise UserError(
            f"{directory} holds no {TOKENIZER_JSON} or {config_path.name}; give a tokenizer's"
            " directory"
        )
    try:
        eos_token = read_json(config_path).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config_path} is damaged ({error}); copy the tokenizer again") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  tokenizers raises nothing narrower
        raise UserError(f"{path} is damaged ({error}); copy the tokenizer again") from None
    if isinstance(eos_token, dict):
        eos_token = eos_token["content"]
    eos_token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if eos_token_id is None:
        raise UserError(
            f"{config_path} names no eos_token of the vocabulary, which ends documents; correct it"
        )
    return tokenizer, eos_token_id
