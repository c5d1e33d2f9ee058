"""Tool calls in a model's output, in the two forms that models are trained on, and the schema of a required call. Pure.

    Hermes, Qwen   text <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...
    Llama 3.1      {"name": ..., "parameters": {...}}, as the whole answer, several of them with `;` between

Anything else is text. A call is recognised only once it is complete, so text is held back from where one may begin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.json_schema import as_part, loosened

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_BEGUN = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)
# Keywords that may allow properties beside those that a schema lists.
_FURTHER = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "$dynamicRef"),
        *("allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"),
    }
)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON
    whole: bool = True  # False: cut off


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function. `schema` None: it takes none, as with OpenAI; `strict`: every keyword of the schema is enforced."""

    name: str
    schema: Mapping[str, Any] | None
    strict: bool = False


class ToolCallStream:
    """The output of a model that was offered `tools`: `push` its text, then `finish`."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._held = ""
        self._begun = False  # whether some text has been shown
        self._calling = False

    def push(self, text: str) -> str:
        """The text that is certain now."""
        self._held += text
        if self._calling or not self._held:
            return ""
        if not self._begun:
            start = self._held.lstrip()
            if not start or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]):
                return ""
            if start.startswith(("{", PYTHON_TAG)):
                self._calling = True
                return ""
        at = self._held.find(OPEN)
        if at >= 0:
            self._calling = True
        else:
            at = len(self._held) - _overlap(self._held)
        shown, self._held = self._held[:at], self._held[at:]
        self._begun = self._begun or bool(shown)
        return shown

    def finish(self) -> tuple[str, tuple[Call, ...]]:
        """The rest of the text, and the calls."""
        held, self._held = self._held, ""
        if calls := _bare(held, self._tools):  # first, as their arguments may contain a tag
            return "", calls
        calls, rest = _tagged(held)
        return (rest, calls) if calls else (held, ())


def call_cut_off(text: str) -> Call | None:
    """The call in output that was cut off and had to follow `schema_of_call`; None where not even its name is complete."""
    match = _BEGUN.match(text)
    return None if match is None else Call(json.loads(match[1]), match[2] or "", whole=False)


def schema_of_call(functions: Iterable[Parameters]) -> dict[str, Any]:
    """The schema of output that is nothing but a call of one of these functions. JobError where their parameters are not the schema of
    an object."""
    calls, parts = list[dict[str, Any]](), dict[str, Any]()
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        parts[str(number)] = _arguments(function, place)
        fields = {"name": {"const": function.name}, "arguments": {"$ref": place}}
        calls.append(
            {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        )
    return {"anyOf": calls, "$defs": parts}


def _arguments(function: Parameters, place: str) -> dict[str, Any]:
    """The schema of a function's arguments, for a `place` in another."""
    if function.schema is None:
        return {"type": "object", "additionalProperties": False}
    schema = dict(function.schema)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        message = f"the parameters of {function.name[:40]} are of type object, not {str(kind)[:40]!r}"
        raise JobError(f"json_schema: {message}")
    if "properties" in schema and schema.keys().isdisjoint(_FURTHER):
        schema["additionalProperties"] = False  # no arguments beside those that it names
    part = as_part(schema, place)
    return {**(part if function.strict else loosened(part)), "type": "object"}


def _overlap(text: str) -> int:
    """How many characters at the end of `text` may begin a call."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)


def _tagged(text: str) -> tuple[tuple[Call, ...], str]:
    """The calls, and the text around them; no call where one cannot be read."""
    calls, around, at = list[Call](), list[str](), 0
    while (begins := text.find(OPEN, at)) >= 0:
        around.append(text[at:begins])
        try:  # to the end of the JSON, not to the next tag, which may be part of a string
            value, end = _DECODER.raw_decode(text, _behind_space(text, begins + len(OPEN)))
        except (ValueError, RecursionError):
            return (), ""
        call, at = _call(value), _behind_space(text, end)
        if call is None or not (text.startswith(CLOSE, at) or at == len(text)):
            return (), ""
        calls.append(call)
        at += len(CLOSE)
    return tuple(calls), "".join((*around, text[at:])).strip()


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # no space at all is some
    return match.end()


def _bare(text: str, tools: frozenset[str]) -> tuple[Call, ...]:
    rest, calls = text.strip().removeprefix(PYTHON_TAG).strip(), list[Call]()
    while rest.startswith("{"):
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return ()
        call = _call(value)
        if call is None or call.name not in tools:
            return ()
        calls.append(call)
        rest = rest[end:].lstrip("; \n\t")
    return () if rest else tuple(calls)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments_given = value.get("arguments", value.get("parameters", {}))
    arguments = _decoded(arguments_given) if isinstance(arguments_given, str) else arguments_given
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        call = Call(name, arguments_given if isinstance(arguments_given, str) else written)
        f"{call.name}{call.arguments}".encode()
    except (
        ValueError,
        RecursionError,
    ):  # Python parses NaN and lone surrogates, which a response cannot contain
        return None
    return call
