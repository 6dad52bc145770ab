"""Keys of config.json that transformers 5 renamed, in the form that older versions read.

transformers 5 reads both forms. Older versions, and servers and converters that follow them, read
the older one alone and take a default where it is missing: a base of 10,000 for the rotary
embedding, whatever the model was trained with. So every config.json that is written here has both
(`configuration.complete_configuration`), and one whose forms differ is refused.
"""

from typing import Any

from base.errors import UserError

# Keys of `rope_parameters` that were keys of config.json, of GPT-NeoX under names of their own.
MOVED = ("rope_theta", "partial_rotary_factor")
NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def older_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the keys of transformers 5 in a config.json say, by the older keys.

    Example: a base for the rotary embedding, without scaling.
        >>> older_form({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5}})
        {'torch_dtype': 'bfloat16', 'rope_theta': 500000.0, 'rope_scaling': None}
    """
    older = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    rope = config.get("rope_parameters")
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        return older  # none, or a dictionary for each kind of layer, which no older key can hold

    names = NEOX_NAMES if config.get("model_type") == "gpt_neox" else {}
    older |= {names.get(key, key): rope[key] for key in MOVED if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in MOVED}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return older | {"rope_scaling": scaling if is_scaled else None}


def check_forms(path: str, config: dict[str, Any]) -> None:
    """Raise UserError if a config.json has a renamed key in both forms, with other values.

    Where `rope_scaling` holds a dictionary, transformers 5 does not read `rope_parameters`: then
    the older form has to be whole.
    """
    scaling = config.get("rope_scaling") or {}
    for key, value in older_form(config).items():
        stated = [place[key] for place in (config, scaling) if key in place]
        is_missing = bool(scaling) and not stated and key != "torch_dtype"
        meant = _comparable(config, value)
        if is_missing or any(_comparable(config, each) != meant for each in stated):
            newer = "dtype" if key == "torch_dtype" else "rope_parameters"
            raise UserError(
                f"{path}: {key} is {', '.join(map(repr, stated)) or 'missing'}, but {newer} is"
                f" {config[newer]!r}; programs read one or the other, so restore what the model was"
                " trained with in both"
            )


def _comparable(config: dict[str, Any], value: Any) -> Any:
    """Return a value such that equal meanings are equal."""
    if not isinstance(value, dict):
        return value.removeprefix("torch.") if isinstance(value, str) else value
    kind = value.get("rope_type", value.get("type", "default"))
    if kind == "default":
        return None
    length = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    stated = {key: each for key, each in value.items() if each is not None}
    own = {key: each for key, each in stated.items() if key not in (*MOVED, "type")}
    return length | own | {"rope_type": kind}
