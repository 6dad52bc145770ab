"""Tables of pydantic models, in Markdown: a row for each field, a section for each model in it."""

import enum
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

LIST_LIMIT = 60  # characters of a default that a cell shows


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; '|' in cells is escaped, lines become one."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def sections(model: type[BaseModel], level: int = 2) -> str:
    """Return the section of a model, and those of all models that its fields hold, each once."""
    return "\n".join(_section(each, level) for each in _with_inner(model))


def _section(model: type[BaseModel], level: int) -> str:
    words = "\n".join(line.strip() for line in (model.__doc__ or "").strip().splitlines())
    return f"{'#' * level} {model.__name__}\n\n{words}\n\n{fields(model)}"


def fields(model: type[BaseModel]) -> str:
    """Return the table of a model's fields."""
    rows = [
        (f"`{name}`", type_text(field.annotation), _default(field), field.description or "")
        for name, field in model.model_fields.items()
    ]
    heads = ["key", "type", "default", "meaning"]
    described = any(row[3] for row in rows)
    return table(heads, rows) if described else table(heads[:3], [row[:3] for row in rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""  # its own section has the values
    if isinstance(value, Path):  # differs from machine to machine
        return "of this checkout"
    if isinstance(value, enum.Enum):
        value = value.value
    shown = "none" if value is None else str(value)
    return f"`{shown}`" if len(shown) <= LIST_LIMIT and shown not in ("()", "{}") else ""


def type_text(annotation: Any) -> str:
    """Return a type as a reader of JSON or TOML says it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in inner if part is not type(None)]
        return " or ".join(dict.fromkeys(parts))
    if origin in (tuple, list, set, frozenset) or annotation in (tuple, list):
        return _list_text(inner)
    if origin is dict:
        return f"table of {_plural(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "path"}
    return names.get(annotation, "any")


def _list_text(inner: tuple[Any, ...]) -> str:
    if len(inner) == 1 or inner[1] is Ellipsis:
        return f"list of {_plural(inner[0])}"
    return f"[{', '.join(map(type_text, inner))}]"


def _plural(annotation: Any) -> str:
    text = type_text(annotation)
    return f"{text}s" if text in ("string", "integer", "number", "boolean", "path") else text


def _with_inner(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    models: dict[type[BaseModel], None] = {model: None}
    queue = [model]
    while queue:
        for field in queue.pop(0).model_fields.values():
            for each in models_in(field.annotation):
                if each not in models:
                    models[each] = None
                    queue.append(each)
    return iter(models)


def is_list(annotation: Any) -> bool:
    """Return whether a type is a list or a table, which `--set` gives whole."""
    return get_origin(annotation) in (tuple, list, dict)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that values of a type are, or hold."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in get_args(annotation):
        yield from models_in(inner)
