"""A sandboxed process that renders the chat templates of one model. Run by path, imported by nothing.

    python -I template_worker.py PARENT MEMORY_BYTES CPU_SECONDS

A template comes with a model, from a stranger. jinja2's sandbox keeps it from Python's internals, but not from endless loops or
text of any size; and should the sandbox have a hole, this process has nothing to lose: it can open no file and no socket, start
no process, and sees only the messages of this model. It ends with its parent, at the end of its input, and after any
render that failed.

Input: 4 bytes of length and JSON, {"template", "variables", "most_bytes"}. Output: a byte, 4 bytes of length and UTF-8: `t` and the
text, `l` where it has more than `most_bytes`, `e` and an error message.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from datetime import datetime
from typing import Any

import jinja2.debug  # noqa: F401 - jinja2 loads it when something fails, when no file can be opened any more
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

try:
    import resource
except ImportError:  # Windows: only the sandbox and the parent's timeout limit a template there
    resource = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG = 1
# Templates that make jinja2 and Python import what they load lazily: afterwards no file can be opened.
_LOADING = (
    "{{ 'é\\n' ~ 1.5 }}{{ strftime_now('%d %b %Y') }}{{ list | tojson }}{{ list | pprint }}{{ 'a b' | wordwrap(1) }}",
    "{% macro m(x) %}{{ x }}{% endmacro %}{% set n = namespace(a=1) %}{% for e in list %}{{ m(e.a) }}{% endfor %}",
    "{{ '%s' | format(1) }}{{ '{}'.format(1) }}{{ list | map(attribute='a') | join | upper | urlize }}{{ 1 / 0 }}",
    "{{ ''.__class__ }}",
    "{{ nothing.at_all }}",
    "{% if %}",
)
MAX_POWER = 64  # of an exponent
LINE_CHARACTERS = 300
TEXT, LONG, ERROR = b"t", b"l", b"e"


class _TooLong(Exception):
    pass


def main(parent: int, memory_bytes: int, cpu_seconds: int) -> int:
    _restrict(parent, memory_bytes)
    for template in _LOADING:
        _answer({"template": template, "variables": {"list": [{"a": "b"}]}, "most_bytes": 1 << 10})
    if resource is not None:
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (0, 0))
    while (head := _read(4)) is not None:
        request = json.loads(_read(int.from_bytes(head, "big")) or b"{}")
        if resource is not None:
            most = resource.getrlimit(resource.RLIMIT_CPU)[1]
            until = int(time.process_time()) + cpu_seconds + 1
            resource.setrlimit(resource.RLIMIT_CPU, (until if most < 0 else min(until, most), most))
        outcome, data = _answer(request)
        _write(outcome + len(data).to_bytes(4, "big"))
        _write(data)
        if outcome == ERROR:
            break
    return 0


def _restrict(parent: int, memory_bytes: int) -> None:
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # the parent ends it
    if sys.platform == "win32":
        import msvcrt

        for stream in (0, 1):
            msvcrt.setmode(stream, os.O_BINARY)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit(0)
    if resource is None:
        return
    limits = [("RLIMIT_AS", memory_bytes), ("RLIMIT_CORE", 0), ("RLIMIT_NPROC", 0)]
    for name, value in limits:
        # macOS knows some of them by name only
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (value, value))


def _answer(request: dict[str, Any]) -> tuple[bytes, bytes]:
    """The kind of the result, and its UTF-8."""
    try:
        return TEXT, _render(request["template"], request["variables"], request["most_bytes"])
    except _TooLong:
        return LONG, b""
    except MemoryError:
        return ERROR, b"it needs too much memory"
    except RecursionError:
        return ERROR, b"it nests too deeply"
    except Exception as error:  # the template may raise anything
        line = " ".join(str(error).split())[:LINE_CHARACTERS]
        if not isinstance(error, TemplateError) or not line:
            line = f"{type(error).__name__}: {line}"
        return ERROR, line.encode(errors="replace")


def _render(template: str, variables: dict[str, Any], most_bytes: int) -> bytes:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    # As transformers has them
    environment.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    del environment.globals["lipsum"]  # makes a text of any length
    text = bytearray()
    for part in environment.from_string(template).generate(**variables):
        text += part.encode()
        if len(text) > most_bytes:
            raise _TooLong
    return bytes(text)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Bound the size of products, also where the memory of a process cannot be limited."""
        if operator == "**" and (abs(left) > MAX_POWER**2 or abs(right) > MAX_POWER):
            raise SecurityError("it computes too large a number")
        for text, times in ((left, right), (right, left)):
            if (
                isinstance(text, str | list | tuple)
                and isinstance(times, int)
                and len(text) * times > 1 << 20
            ):
                raise SecurityError("it repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's output for training; here it is rendered as any other text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict`, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace without names that could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores an attribute called {name[:40]!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes what HTML would need."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object) -> None:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _read(count: int) -> bytes | None:
    """None at the end of the input."""
    data = bytearray()
    while len(data) < count:
        part = os.read(0, min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
