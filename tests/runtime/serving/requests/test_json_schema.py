"""A schema's form and size, before anything understands it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.json_schema import (
    MAX_LEVELS,
    MAX_SCHEMA_BYTES,
    as_part,
    checked_schema,
    loosened,
)
from fusion.runtime.serving.requests.request import GenerateRequest

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(schema=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), values, max_size=4))
def test_it_travels_as_the_same_json_with_its_keys_in_order(schema: dict[str, object]) -> None:
    try:
        text = checked_schema(json.dumps(schema, indent=2))
    except JobError as error:
        assert "UTF-8" in str(error) or "$ref" in str(error)
        return
    assert json.loads(text) == schema and list(json.loads(text)) == list(schema)
    assert checked_schema(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[]",
            "true",
            "5",
            "{",
            "nul",
            '{"a": NaN}',
            '{"a": Infinity}',
            '{"a": 1e999}',
            '{"a": "\\ud800"}',
        ),
        *("[" * 10**6, '{"a":' * 40_000, '{"enum": ["' + "x" * MAX_SCHEMA_BYTES + '"]}'),
        '{"a":' * MAX_LEVELS + "{}" + "}" * MAX_LEVELS,
        *(
            '{"$ref": "http://a/b"}',
            '{"allOf": [{"x": {"$ref": "file:///etc/passwd"}}]}',
            '{"$ref": "other.json"}',
        ),
        *('{"$dynamicRef": "//x"}', '{"x-guidance": {"whitespace_pattern": ".*"}}'),
    ],
)
def test_what_is_no_schema_is_one_line(text: str) -> None:
    with pytest.raises(JobError, match=r"^json_schema: ") as found:
        checked_schema(text)
    assert "\n" not in str(found.value) and len(str(found.value)) < 200


def test_a_format_that_says_something_to_readers_alone_is_left_out() -> None:
    """Libraries write `password`, `path` or `binary` for fields of such kinds."""
    named = {"format": {"type": "string", "format": "ipv4"}, "enum": {"format": "path"}, "a": True}
    schema = {
        "type": "object", "properties": named, "required": ["format"], "format": "regex", "additionalProperties":
        {"anyOf": [{"type": "string", "format": "password", "title": "b"}, {"format": 5}]}, "$defs": {"c": {"format": "uuid"}},
        "const": {"format": "path"}, "enum": [{"format": "path"}], "default": {"format": "path"},
    }  # fmt: skip
    kept = {
        **schema, "properties": {**named, "enum": {}},
        "additionalProperties": {"anyOf": [{"type": "string", "title": "b"}, {"format": 5}]},
    }  # fmt: skip
    del kept["format"]
    assert json.loads(checked_schema(json.dumps(schema))) == kept


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-29"], ["2023-02-29", "1900-02-29"]),
        ("time", ["12:30:59Z"], ["12:30:60Z"]),
        ("date-time", ["2024-02-29T12:30:59Z"], ["2024-02-29T12:30:60Z", "2023-02-29t12:30:00Z"]),
    ],
)
def test_dates_and_times_are_held_to_the_calendar(form: str, right: list[str], wrong: list[str]) -> None:
    """By patterns beside their format, which says what else they are made of."""
    text = checked_schema(json.dumps({"format": form, "allOf": [{"type": "string"}]}))
    assert checked_schema(text) == text, "once"
    kind, *beside = json.loads(text)["allOf"]
    assert kind == {"type": "string"}
    for each in (*right, *wrong):
        assert all(re.search(part["pattern"], each) for part in beside) == (each in right)
    assert checked_schema('{"properties":{"format":{}},"const":{"format":"date"}}').count("allOf") == 0


def test_a_part_refers_to_itself_whatever_it_is_called() -> None:
    """From a part with an `$id` the references of all would count."""
    schema = {"$id": "https://a/b", "properties": {"$id": {"$ref": "#/$defs/c"}}, "$defs": {"c": {}}}
    assert as_part(schema, "#/$defs/0") == {
        "properties": {"$id": {"$ref": "#/$defs/0/$defs/c"}},
        "$defs": {"c": {}},
    }


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"not": {}}}, {"type": "array", "items": {}}),
        ({"properties": {"not": {"if": {}, "then": {}}}}, {"properties": {"not": {}}}),
        ({"enum": [{"not": 1}], "default": {"contains": 1}}, {"enum": [{"not": 1}], "default": {"contains": 1}}),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 1}, {"const": 2}]}),
        ({"oneOf": [{"const": 1}], "anyOf": [{"const": 2}]}, {"anyOf": [{"const": 2}]}),
        *(({"pattern": pattern}, {}) for pattern in ("^(?!a)b", "(?<=a)b", r"\ba", r"(a)\1")),
        *(({"pattern": pattern}, {"pattern": pattern}) for pattern in ("^(?:a|b)$", r"(?<c>\d)")),
        ({"minProperties": 1, "propertyNames": {"pattern": "a"}}, {"minProperties": 1}),
        ({"minProperties": 1, "properties": {"a": {}}, "required": 5}, {"properties": {"a": {}}, "required": 5}),
        *(
            ({"maxProperties": 1, "properties": {"a": {}}, "required": ["a"]},) * 2,
            ({"pattern": 5, "properties": []},) * 2,
        ),
    ],
)  # fmt: skip
def test_what_no_answer_can_be_held_to_is_left_out(said: dict[str, Any], kept: dict[str, Any]) -> None:
    assert loosened(said) == kept


def test_a_schema_comes_before_the_prompt_and_is_announced_with_it() -> None:
    schema = checked_schema('{"enum": ["ä"]}')
    for fields in ({"prompt": "x", "chat": True}, {"prompt": ""}, {"prompt_ids": (1, 2)}):
        asked = GenerateRequest(schema=schema, **fields)  # type: ignore[arg-type]
        assert asked.newer
        header, payload = asked.to_frame()
        # A gateway that knows of no schemas refuses the kind of prompt.
        assert header["prompt"] in ("chat+schema", "text+schema", "ids+schema")
        assert GenerateRequest.from_frame(header, memoryview(payload)) == asked
        for size in (0, -1, len(payload) + 1, True, "x"):
            with pytest.raises(JobError):
                GenerateRequest.from_frame({**header, "schema": size}, memoryview(payload))
