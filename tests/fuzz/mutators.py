"""Damages of valid input, drawn by a seed: of bytes, of lines of text, and of JSON by its values."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from base.digests import SEAL, sealed

DEEP = 100_000
# Text in the place of a JSON value, not all of it JSON.
HOSTILE = (
    *("null", "true", "-1", "0", "1.5", "1e200", "-1e308", "1e400", "NaN", "-Infinity"),
    *("9223372036854775808", "-9223372036854775809", "9" * 30, "9" * 5000, "1" + "0" * 400),
    *('""', '"\\u0000"', '"a\\u001b[31mb"', '"\\ud800"', '"../../etc/passwd"', '"/"', '"."'),
    *('"' + "a" * 5000 + '"', '"1"', '"1e5"', '"\N{SNOWMAN}"', '"\\ufffe"', '"nan"', "{}", "[]"),
    *("[[]]", '{"a": 1}', "[1, 2]", "[" * 60 + "]" * 60, "[" * DEEP, '{"a":' * DEEP),
    *("[" * DEEP + "]" * DEEP, "1e8", "100000000", "'a'", "0x10", "1_000", "", " "),
)
PLACE = "@@here@@"

Path = tuple[Any, ...]


def mutated_bytes(random: Random, content: bytes) -> bytes:
    """Bytes with one to three damages."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(BYTES)(random, content)
    return content


def _span(random: Random, content: bytes) -> tuple[int, int]:
    start = random.randint(0, len(content))
    return start, min(len(content), start + random.choice((1, 1, 2, 8, 100, 4096)))


def _flip(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(random: Random, content: bytes) -> bytes:
    return content[: random.choice((0, 1, len(content) - 1, random.randint(0, len(content))))]


def _insert(random: Random, content: bytes) -> bytes:
    start, _ = _span(random, content)
    added = random.choice((random.randbytes(random.randint(1, 40)), b"\x00", b"\xff\xfe", b"\n"))
    return content[:start] + added + content[start:]


def _delete(random: Random, content: bytes) -> bytes:
    start, stop = _span(random, content)
    return content[:start] + content[stop:]


def _repeat(random: Random, content: bytes) -> bytes:
    start, stop = _span(random, content)
    return content[:stop] + content[start:stop] * random.choice((1, 3)) + content[stop:]


def _fill(random: Random, content: bytes) -> bytes:
    start, stop = _span(random, content)
    return content[:start] + random.choice((b"\x00", b"\xff")) * (stop - start) + content[stop:]


BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (
    *(_flip, _flip, _truncate, _insert, _delete, _repeat, _fill),
)


def mutated_lines(random: Random, content: bytes) -> bytes:
    """Text with a field or a line changed, or its bytes damaged."""
    lines = content.split(b"\n")
    number = random.randrange(len(lines))
    separator = random.choice((b"|", b"=", b",", b"-", b" ", b":", b"_", b"."))
    fields = lines[number].split(separator)
    index = random.randrange(len(fields))
    kind = random.randrange(6)
    if kind == 0:
        del fields[index]
    elif kind == 1:
        fields[index] = random.choice(HOSTILE).encode()[:20_000]
    elif kind == 2:
        lines.insert(number, random.choice(lines))
    elif kind == 3:
        lines[number] = lines[number][: random.randint(0, len(lines[number]))]
        return b"\n".join(lines)
    else:
        return mutated_bytes(random, content)
    lines[number] = separator.join(fields)
    return b"\n".join(lines)


def mutated_json(random: Random, content: bytes) -> bytes:
    """JSON with one or two values changed, keys removed, added or given twice, or damaged bytes."""
    if random.random() < 0.2:
        return mutated_bytes(random, content)
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 2))):
        value = _changed(random, value)
    text = json.dumps(value)
    while f'"{PLACE}"' in text:
        text = text.replace(f'"{PLACE}"', random.choice(HOSTILE), 1)
    if random.random() < 0.05:
        key = json.dumps(random.choice([*value])) if isinstance(value, dict) and value else '"a"'
        text = text.replace("{", "{" + key + ": 1, ", 1)
    return (_resealed(text) if random.random() < 0.8 else text).encode()


def _resealed(text: str) -> str:
    """A record with the seal of its values, if it had one: else no check after it would be met."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or SEAL not in value:
        return text
    return json.dumps(sealed({key: member for key, member in value.items() if key != SEAL}))


def _changed(random: Random, value: Any) -> Any:
    """A JSON value with a change at one place of it."""
    members = list(_places(value))
    parent, key = random.choice(members) if members else (None, None)
    if parent is None:
        return PLACE
    kind = random.random()
    if kind < 0.2:
        del parent[key]
    elif kind < 0.3 and isinstance(parent, dict):
        parent[random.choice(("a", "", "\n", "a" * 3000, "../x"))] = PLACE
    elif kind < 0.4:  # a value from elsewhere in the file
        other, name = random.choice(members)
        parent[key] = json.loads(json.dumps(other[name]))
    else:
        parent[key] = PLACE
    return value


def _places(value: Any) -> Any:
    """All containers with their keys, of the first 200 members of each."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys[:200]:
            yield value, key
            yield from _places(value[key])


def mutated_json_lines(random: Random, content: bytes) -> bytes:
    """JSON lines with one of them changed, or their bytes damaged."""
    lines = content.splitlines(keepends=True)
    if not lines or random.random() < 0.3:
        return mutated_bytes(random, content)
    number = random.randrange(len(lines))
    lines[number] = mutated_json(random, lines[number]).replace(b"\n", b"") + b"\n"
    return b"".join(lines)


def mutated_header(random: Random, content: bytes) -> bytes:
    """A safetensors file with a changed header, the length before it right or not."""
    if random.random() < 0.3:
        return mutated_bytes(random, content)
    size = int.from_bytes(content[:8], "little")
    header = mutated_json(random, content[8 : 8 + size])
    length = random.choice((len(header), len(header), len(header), size, 2**62, 0))
    return length.to_bytes(8, "little") + header + content[8 + size :]
