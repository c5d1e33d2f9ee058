"""The schema that an answer has to follow, as a client gives it: its form and size, before anything understands it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fusion.runtime.job.errors import JobError

MAX_SCHEMA_BYTES = 64 << 10
MAX_LEVELS = 64  # of objects and lists
# Of texts, that an answer is held to. All others say something to readers alone, as every one does by JSON Schema's own rule.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
# What llguidance does not hold dates and times to, which most programs then cannot read: the 29th of February is a day of leap
# years, and minutes have no second 60.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_BESIDE = {"date": (_DAY,), "date-time": (_DAY, f"[Tt]{_SECOND}"), "time": (f"^{_SECOND}",)}  # patterns
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
_FOR_READERS = frozenset({"title", "description", "default", "examples", "$comment"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# What no grammar is made of. Without it a schema allows more, and all that it allowed.
_UNHELD = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")  # or back
JSON_OBJECT = '{"type":"object"}'  # what `json_object` asks for


def checked_schema(text: str) -> str:
    """The schema as it travels: JSON without spaces, its keys in their order, its formats those of FORMATS, its dates and times
    held to the calendar. JobError, in one line, where it is no JSON object,
    too large, nested too deeply, or refers to something outside of itself, which nobody would fetch."""
    if len(text) > 4 * MAX_SCHEMA_BYTES:
        raise JobError(f"json_schema: at most {MAX_SCHEMA_BYTES >> 10} KiB")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise JobError(f"json_schema: at most {MAX_LEVELS} levels") from None
    except ValueError as error:
        raise JobError(f"json_schema: not JSON: {error}") from None
    return schema_text(schema)


def schema_text(schema: object) -> str:
    """`checked_schema`, of JSON that has been read."""
    if not isinstance(schema, dict):
        raise JobError("json_schema: a JSON object")
    _check(schema)
    try:
        text = json.dumps(_known_formats(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size = len(text.encode())
    except UnicodeEncodeError:
        raise JobError("json_schema: text that UTF-8 can hold") from None
    except ValueError:  # 1e999, which JSON can say
        raise JobError("json_schema: numbers that a computer can hold") from None
    if size > MAX_SCHEMA_BYTES:
        raise JobError(f"json_schema: at most {MAX_SCHEMA_BYTES >> 10} KiB, not {size} bytes")
    return text


def as_part(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """The same for a `place` ("#/...") in another schema: what refers to a part of it still does, and what says something to readers
    alone takes no room. JobError as `checked_schema`."""
    _check(schema)

    def moved(name: str, value: Any) -> Any:
        inside = name in _REFERENCES and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return f"{place}{value[1:]}" if inside else value

    def told(each: dict[str, Any]) -> dict[str, Any]:
        return {name: moved(name, value) for name, value in each.items() if name not in _FOR_READERS}

    part = {name: value for name, value in schema.items() if name != "$id"}  # from which "#" would count
    return _mapped(part, told)  # type: ignore[no-any-return]


def loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """The same without what no grammar is made of: it allows all that the schema does, and more."""
    return _mapped(schema, _held)  # type: ignore[no-any-return]


def _held(schema: dict[str, Any]) -> dict[str, Any]:
    held = {name: value for name, value in schema.items() if name not in _UNHELD}
    if "oneOf" in held:
        either = held.pop("oneOf")
        held.setdefault("anyOf", either)
    pattern, properties = held.get("pattern"), held.get("properties")
    required = held["required"] if isinstance(held.get("required"), list) else []
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
        del held["pattern"]
    if isinstance(properties, dict) and any(each not in required for each in properties):
        for name in ("minProperties", "maxProperties"):  # which are counted among required ones alone
            held.pop(name, None)
    return held


def _check(schema: dict[str, Any]) -> None:
    if "x-guidance" in schema:  # options of the library that would make something else than JSON
        raise JobError("json_schema: x-guidance has no meaning here")
    level: list[Any] = [schema]
    for _ in range(MAX_LEVELS):
        for each in level:
            if isinstance(each, dict):
                _check_references(each)
        level = [
            value
            for each in level
            if isinstance(each, dict | list)
            for value in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise JobError(f"json_schema: at most {MAX_LEVELS} levels")


def _known_formats(schema: Any) -> Any:
    """The same without the formats that are not among FORMATS, and with what is missing in them; of its own result, the same."""

    def known(each: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in each.items() if not _is_unknown_format(name, value)}
        form, beside = kept.get("format"), kept.get("allOf", [])
        more = [{"pattern": each} for each in _BESIDE.get(form, ())] if isinstance(form, str) else []
        if isinstance(beside, list) and (new := [each for each in more if each not in beside]):
            kept["allOf"] = [*beside, *new]
        return kept

    return _mapped(schema, known)


def _is_unknown_format(name: str, value: Any) -> bool:
    return name == "format" and isinstance(value, str) and value not in FORMATS


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The same with what `change` makes of the keywords of each schema in it: not of names that its author chose, nor in values."""
    if isinstance(schema, list):
        return [_mapped(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict[str, Any]()
    for name, value in change(schema).items():
        if name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _mapped(each, change) for key, each in value.items()}
        else:
            kept[name] = value if name in _VALUES else _mapped(value, change)
    return kept


def _check_references(part: dict[str, Any]) -> None:
    for name in _REFERENCES:
        target = part.get(name, "#")
        if isinstance(target, str) and not target.startswith("#"):
            raise JobError(f"json_schema: {name} to a place in it (#...), not {target[:80]!r}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
