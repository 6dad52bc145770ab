"""config.json and generation_config.json of an HF directory, read and written.

transformers 5 renamed keys of config.json, and reads both forms. Older versions, and servers and
converters that follow them, read the older one alone and take a default where it is missing: a base
of 10,000 for the rotary embedding, whatever the model was trained with. So every config.json that
is written here has both, and one whose forms differ is refused.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from base.errors import UserError
from base.files import write_json
from base.reading import read_object
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf import opensci
from train.model.config import MOST_LAYERS
from train.model.families import FAMILIES, FULL
from train.model.families.family import NO_NAMES

# Keys of `rope_parameters` that were keys of config.json, in some families under other names.
MOVED = ("rope_theta", "partial_rotary_factor")


def read_config(hf_dir: Path) -> PretrainedConfig:
    """Return config.json as transformers understands it; no code of the directory is run.

    Raises:
        UserError: it is damaged, of a kind that transformers does not know, or says in older keys
            something else than in newer ones.
    """
    opensci.register()
    path = hf_dir / "config.json"
    stated = read_object(path) if path.is_file() else {}  # else transformers says what is missing
    check_depth(str(path), stated)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            hf_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001  its checks of other values raise nearly anything
        raise UserError(
            f"{hf_dir}/config.json: {' '.join(str(error).split())[:200]}; give an HF directory"
        ) from None
    check_understood(str(path), config, stated)
    return config


def check_depth(path: str, stated: dict[str, Any]) -> None:
    """Raise UserError for more layers than any model has, or none, in a config.json.

    To be called before transformers makes a list of so many.
    """
    layers = stated.get("num_hidden_layers", 1)
    if isinstance(layers, int) and not 0 < layers <= MOST_LAYERS:
        raise UserError(f"{path}: no model has {layers:,} layers; restore it")


def check_understood(path: str, config: PretrainedConfig, stated: dict[str, Any]) -> None:
    """Raise UserError if a config.json says something else in older keys than in newer ones.

    Of the rotary embeddings of several kinds of layers the newer ones are how transformers
    understands the file, as it reads the older ones for one kind alone.
    """
    rope = getattr(config, "rope_parameters", None)
    check_forms(path, stated | ({"rope_parameters": rope} if by_kind(rope) else {}))


def configuration(model_type: str, **settings: Any) -> PretrainedConfig:
    """Return a configuration of transformers with these settings, the others at their defaults.

    ValueError and others of transformers for values that do not go together.
    """
    opensci.register()
    config: PretrainedConfig = AutoConfig.for_model(model_type, **settings)
    return config


def write_configuration(directory: Path, family: str, settings: dict[str, Any], dtype: str) -> None:
    """Write both files for a model of transformers' `model_type` `family`."""
    config = configuration(family, **settings)
    config.architectures, config.dtype = [FAMILIES[family].architecture], DTYPES[dtype]
    config.save_pretrained(directory)
    complete_configuration(directory, dtype)
    generation = GenerationConfig(
        eos_token_id=config.eos_token_id, bos_token_id=None, pad_token_id=None
    )
    generation.save_pretrained(directory)


def complete_configuration(directory: Path, dtype: str, **more: Any) -> None:
    """Write config.json again, with every renamed key in both forms (`older_form`).

    Every config.json that is written comes from here.

    `more` are keys to add.
    """
    # As transformers reads it, which fills the newer form from an older one.
    rope = getattr(read_config(directory), "rope_parameters", None)
    path = directory / "config.json"
    config = read_object(path) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}
    config |= {"rope_parameters": rope} if rope else {}
    write_json(path, config | older_form(config) | more)


def older_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the keys of transformers 5 in a config.json say, by the older keys.

    Example: a base for the rotary embedding, without scaling.
        >>> older_form({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5}})
        {'torch_dtype': 'bfloat16', 'rope_theta': 500000.0, 'rope_scaling': None}
    """
    older = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    rope = config.get("rope_parameters")
    if not rope:
        return older
    if kinds := by_kind(rope):
        return older | _older_by_kind(kinds)

    family = FAMILIES.get(config.get("model_type", ""))
    names = family.older_keys if family else NO_NAMES
    older |= {names.get(key, key): rope[key] for key in MOVED if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in MOVED}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return older | {"rope_scaling": scaling if is_scaled else None}


def by_kind(rope: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the rotary embedding of each kind of layer; nothing if all have the same."""
    return {kind: each for kind, each in (rope or {}).items() if isinstance(each, dict)}


def _older_by_kind(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one base for all layers, and a scaling of those with full attention, as Olmo 3's.

    None for both where that is not what the kinds have.
    """
    scaled = {kind for kind, each in kinds.items() if each.get("rope_type", "default") != "default"}
    bases = {each.get("rope_theta") for each in kinds.values()}
    if len(bases) > 1 or scaled - {FULL}:
        return {"rope_theta": None, "rope_scaling": None}
    scaling = {key: value for key, value in kinds[FULL].items() if key not in MOVED}
    return {"rope_theta": bases.pop(), "rope_scaling": scaling if scaled else None}


def check_forms(path: str, config: dict[str, Any]) -> None:
    """Raise UserError if a config.json has a renamed key in both forms, with other values.

    Where `rope_scaling` holds a dictionary, transformers 5 does not read `rope_parameters`: then
    the older form has to be whole.
    """
    scaling = config.get("rope_scaling") or {}
    for key, value in older_form(config).items():
        stated = [holder[key] for holder in (config, scaling) if key in holder]
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
    # Older files say `type` for `rope_type`.
    kind = value.get("rope_type", value.get("type", "default"))
    if kind == "default":
        return None
    # A scaling that states no original length means the model's own context.
    length = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    stated = {key: each for key, each in value.items() if each is not None}
    scaling = {key: each for key, each in stated.items() if key not in (*MOVED, "type")}
    return length | scaling | {"rope_type": kind}
