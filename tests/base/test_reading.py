"""JSON of unknown origin: what is taken, and what is refused in one line."""

import json
import sys
from typing import Self

import pytest
from pydantic import model_validator

from base.errors import UserError
from base.frozen import Frozen
from base.reading import (
    MOST_BYTES,
    MOST_DEPTH,
    NotJsonError,
    as_model,
    parse_json,
    read_json,
    read_model,
    read_object,
    read_regular,
)


class SmallRecord(Frozen):
    step: int
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, -1e-300, true, null, "\\u00e9\\n", {}]}',
        "9223372036854775807",
        '"\\ud83d\\ude00"',  # one character, in two halves
        "[" * MOST_DEPTH + "]" * MOST_DEPTH,
    ],
)
def test_json_is_what_the_standard_library_reads(text):
    assert parse_json(text, "a") == json.loads(text)
    assert parse_json(b"\xef\xbb\xbf" + text.encode(), "a") == json.loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested more than 64 deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 64 deep"),
        ("[" * 100_000, "nested more than 64 deep"),
        ("9" * 5000, "a number of 5,000 digits"),
        ("-" + "9" * 350, "beyond what a float holds"),
        ("1e400", "beyond what a float holds"),
        ("[NaN]", "NaN is no number of JSON"),
        ('{"a": -Infinity}', "-Infinity is no number of JSON"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        ('"\\ud800"', "holds a character that text has not"),
        ('{"a\\u0000": 1}', "holds a character that text has not"),
        ('"\udcff"', "holds a character that text has not"),  # a byte of an argument, 0xff
        ("x\udcff", "holds a character that text has not"),
    ],
)
def test_what_parsers_take_for_different_things_is_refused(text, reason):
    with pytest.raises(UserError, match=rf"^a: .*{reason}.*; do that$") as refused:
        parse_json(text, "a", "do that")
    assert not isinstance(refused.value, NotJsonError)


@pytest.mark.parametrize("text", ["", "{", "[1,]", "a", "{'a': 1}", b"\xff", '"\n"', "1 2"])
def test_what_is_no_json_is_named(text):
    with pytest.raises(NotJsonError, match=r"^a is not valid JSON \(.*\); restore it$"):
        parse_json(text, "a")


def test_the_depth_that_is_taken_does_not_depend_on_the_caller():
    """Python's own parser refuses what its caller leaves no room for on the stack."""
    text = "[" * MOST_DEPTH + "]" * MOST_DEPTH

    def below(frames: int) -> object:
        return below(frames - 1) if frames else parse_json(text, "a")

    assert below(sys.getrecursionlimit() - 300) == parse_json(text, "a")


def test_an_integer_beyond_64_bits_is_a_float():
    assert parse_json("1000000000000000019884624838656", "a") == 1e30  # of many a tokenizer
    assert isinstance(parse_json("9223372036854775808", "a"), float)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1e30}', "'step': Input should be a valid integer"),
        ('{"step": 9223372036854775808}', "'step': Input should be a valid integer"),
        ('{"step": "1"}', "'step': Input should be a valid integer"),
        ('{"step": 1, "nmaes": []}', r"unknown key 'nmaes'; did you mean names\?"),
        ("{}", "key 'step' is missing; add it"),
        ("[]", "'the whole file': Input should be an object"),
    ],
)
def test_a_record_is_refused_by_its_first_wrong_key(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^{path}: {message}"):
        read_model(SmallRecord, path)


def test_a_list_of_json_is_a_tuple(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"step": 3, "names": ["a", "b"]}')
    assert read_model(SmallRecord, path) == SmallRecord(step=3, names=("a", "b"))
    assert read_model(dict[str, object], path) == read_object(path) == read_json(path)


def test_a_sparse_file_of_terabytes_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(MOST_BYTES * 2000)
    with pytest.raises(UserError, match=r"has [\d,]+ bytes, no such file has over"):
        read_regular(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(UserError, match=r"b.json holds no JSON object; restore it"):
        read_object(tmp_path / "b.json")


class _Part(Frozen):
    low: int
    high: int

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.low == self.high:
            raise ValueError("low is high; set low to less")
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class _Whole(Frozen):
    part: _Part


@pytest.mark.parametrize(
    ("low", "line"),
    [
        (1, "run.json: 'part': low is high; set low to less"),
        (2, "run.json: 'part': low is above high; correct one of them"),
    ],
)
def test_keys_of_a_part_that_do_not_go_together(low: int, line: str) -> None:
    """The line names one next action, the rule's own if it has one, and not the whole part."""
    with pytest.raises(UserError) as error:
        as_model(_Whole, {"part": {"low": low, "high": 1}}, "run.json")
    assert str(error.value) == line
