"""The schema that constrains a completion, as a client sends it: its form and size, before anything interprets it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fusion.runtime.job.errors import JobError

MAX_SCHEMA_BYTES = 64 << 10
MAX_LEVELS = 64  # of objects and lists
# Formats of strings that are enforced. All others are annotations, as JSON Schema allows.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
# Stricter than llguidance, whose dates and times most programs cannot parse: the 29th of February is in leap years only, and there
# is no second 60.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"^([0-9]{{4}}-(0[13-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"
_BESIDE = {"date": (_DAY,), "date-time": (_DAY, f"[Tt]{_SECOND}"), "time": (f"^{_SECOND}",)}  # patterns
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
_FOR_READERS = frozenset({"title", "description", "default", "examples", "$comment"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that no grammar can enforce. Without them a schema allows more, and all that it allowed.
_UNENFORCEABLE = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9bBk]")  # or back
JSON_OBJECT = '{"type":"object"}'  # what `json_object` asks for


def checked_schema(text: str) -> str:
    """The canonical form: JSON without spaces, keys in their order, only formats of FORMATS, dates and times restricted to the calendar.
    JobError, in one line, where it is not a JSON object, too large, nested too deeply, or has a reference to something outside of
    it, which is never fetched."""
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
    """As `checked_schema`, for parsed JSON."""
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
    """The schema, to be embedded at `place` ("#/...") of another: its references are rewritten, its annotations dropped. JobError as
    `checked_schema`."""
    _check(schema)

    def relocated(name: str, value: Any) -> Any:
        inside = name in _REFERENCES and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        return f"{place}{value[1:]}" if inside else value

    def embedded(each: dict[str, Any]) -> dict[str, Any]:
        return {name: relocated(name, value) for name, value in each.items() if name not in _FOR_READERS}

    part = {name: value for name, value in schema.items() if name != "$id"}  # the base of its references
    return _map_schemas(part, embedded)  # type: ignore[no-any-return]


def loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that no grammar can enforce: it allows all that the schema does, and more."""
    return _map_schemas(schema, _enforceable)  # type: ignore[no-any-return]


def _enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in schema.items() if name not in _UNENFORCEABLE}
    if "oneOf" in kept:
        either = kept.pop("oneOf")
        kept.setdefault("anyOf", either)
    pattern, properties = kept.get("pattern"), kept.get("properties")
    required = kept["required"] if isinstance(kept.get("required"), list) else []
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
        del kept["pattern"]
    if isinstance(properties, dict) and any(each not in required for each in properties):
        for name in ("minProperties", "maxProperties"):  # which llguidance counts among required ones only
            kept.pop(name, None)
    return kept


def _check(schema: dict[str, Any]) -> None:
    if "x-guidance" in schema:  # options of llguidance that would allow something else than JSON
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
    """The schema without formats outside of FORMATS, and with the patterns of `_BESIDE`. Idempotent."""

    def known(each: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in each.items() if not _is_unknown_format(name, value)}
        form, beside = kept.get("format"), kept.get("allOf", [])
        more = [{"pattern": each} for each in _BESIDE.get(form, ())] if isinstance(form, str) else []
        if isinstance(beside, list) and (new := [each for each in more if each not in beside]):
            kept["allOf"] = [*beside, *new]
        return kept

    return _map_schemas(schema, known)


def _is_unknown_format(name: str, value: Any) -> bool:
    return name == "format" and isinstance(value, str) and value not in FORMATS


def _map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with `change` applied to the keywords of each subschema, but not to property names, nor within values."""
    if isinstance(schema, list):
        return [_map_schemas(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = dict[str, Any]()
    for name, value in change(schema).items():
        if name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _map_schemas(each, change) for key, each in value.items()}
        else:
            kept[name] = value if name in _VALUES else _map_schemas(value, change)
    return kept


def _check_references(part: dict[str, Any]) -> None:
    for name in _REFERENCES:
        target = part.get(name, "#")
        if isinstance(target, str) and not target.startswith("#"):
            raise JobError(f"json_schema: {name} to a place in it (#...), not {target[:80]!r}")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
