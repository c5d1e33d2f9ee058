"""Frozen dataclasses from untrusted mappings (a TOML file, a msgpack map off the wire).

Strict on purpose: unknown keys, missing keys and wrong types are errors that name the field. Only keys that a newer release
may have added to a message are ignored (`known_only`). Types: None, bool, int, float, str, Literal, unions, fixed and open
tuples, NewType and nested dataclasses.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MAX_ITEMS = 100_000


def build(cls: type[T], value: object, where: str = "", *, known_only: bool = False) -> T:
    """An instance of the dataclass `cls` from a mapping. ValueError names the field (`where.field`) and the rule;
    a `__post_init__` that raises ValueError is reported the same way. `known_only`: keys that are no fields of `cls` are
    ignored, here and in nested dataclasses."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where or cls.__name__} must be a table, not {_kind(value)}")
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for key in value:
        if key not in known and not known_only:
            raise ValueError(f"{prefix}{key!s:.80} is not known here (known: {', '.join(sorted(known))})")
    hints = _hints(cls)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for name, field in known.items():
        if name in value:
            found[name] = _convert(hints[name], value[name], prefix + name, known_only)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{prefix}{name} is missing")
    try:
        return cls(**found)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(prefix) else prefix + text) from None


def plain(value: Any) -> dict[str, Any]:
    """The dataclass as msgpack-able values; `build` is its inverse."""
    return asdict(value)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)!r:.60}"


def _convert(hint: Any, value: object, where: str, known_only: bool) -> Any:
    if isinstance(hint, NewType):
        return _convert(hint.__supertype__, value, where, known_only)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint) or type(value) not in {type(a) for a in get_args(hint)}:
            raise ValueError(
                f"{where} must be one of {', '.join(map(str, get_args(hint)))}, not {_kind(value)}"
            )
        return value
    if origin is Union or origin is types.UnionType:
        return _either(get_args(hint), value, where, known_only)
    if origin is tuple:
        return _tuple(get_args(hint), value, where, known_only)
    if is_dataclass(hint):
        return build(hint, value, where, known_only=known_only)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _either(options: tuple[Any, ...], value: object, where: str, known_only: bool) -> Any:
    if value is None:
        if type(None) in options:
            return None
        raise ValueError(f"{where} must be set")
    rest = [option for option in options if option is not type(None)]
    for option in rest[:-1]:
        try:
            return _convert(option, value, where, known_only)
        except ValueError:
            continue
    return _convert(rest[-1], value, where, known_only)


def _tuple(items: tuple[Any, ...], value: object, where: str, known_only: bool) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_ITEMS:
        raise ValueError(f"{where} must be a list of at most {MAX_ITEMS} values, not {_kind(value)}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_convert(items[0], v, f"{where}[{i}]", known_only) for i, v in enumerate(value))
    if len(value) != len(items):
        raise ValueError(f"{where} must have {len(items)} values, not {len(value)}")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(_convert(t, v, f"{where}[{i}]", known_only) for i, (t, v) in pairs)


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _scalar(hint: Any, value: object, where: str) -> Any:
    right = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value, right = float(value), True
        except OverflowError:
            raise ValueError(f"{where} does not fit a number of 64 bits") from None
    if not right:
        raise ValueError(f"{where} must be {_NAMES.get(hint, hint)}, not {_kind(value)}")
    if hint is int and not -(2**63) <= value < 2**63:  # type: ignore[operator]
        raise ValueError(f"{where} does not fit 64 bits")
    return value
