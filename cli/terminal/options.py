"""The options that commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fusion.runtime.job.size_text import parse_size

if TYPE_CHECKING:
    from fusion.runtime.job.admission import AdmissionSpec
    from fusion.runtime.serving.http.config import HttpConfig

DEFAULT_HOME = Path("~/.fusion-peer")
BOOTSTRAP_FILE = "bootstrap_peers.txt"
LEAST_LENT_BYTES = 1 << 10
PACKAGE = Path(__file__).resolve().parents[2]  # fusion, with the files that lie beside its code


class Who(StrEnum):
    """May own a stage of a job, read it and ask."""

    open = "open"
    listed = "listed"
    granted = "granted"


def a_path(text: str) -> Path:
    """The parser of every option and argument that is a path. BadParameter for an empty one."""
    if not str(text):  # of a variable that is not set: it is not the working folder that was meant
        raise typer.BadParameter("a path, not ''")
    return Path(text)


Home = Annotated[
    Path,
    typer.Option(
        "--home", metavar="DIR", parser=a_path, help="Folder of this machine's identity, cache and state."
    ),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        metavar="FILE|ADDR",
        help="Peers to join through: a file with one multiaddr a line, or a multiaddr; may be repeated. "
        f"Without it {BOOTSTRAP_FILE} is read.",
    ),
]
PeerAddress = Annotated[
    str | None,
    typer.Option(
        "--peer", metavar="ADDR", help="Send requests to this peer (a multiaddr ending in /p2p/ID)."
    ),
]
SwarmKey = Annotated[
    Path | None,
    typer.Option(
        "--swarm-key",
        metavar="FILE",
        parser=a_path,
        help="The key of a closed swarm (default: the one in the home, if any).",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, one object a line, and nothing else on stdout.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show log lines and, after an error, the traceback.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's name, name@author, or a prefix of its id.")]
StopWith = Annotated[
    int | None,
    typer.Option("--stop-with", metavar="PID", hidden=True, help="Stop when the parent PID is gone."),
]


def parse_lent(text: str, option: str) -> int:
    """The bytes that the value of `option` means, which a volunteer lends. ValueError for what is no size, or for less than could be
    meant."""
    size = parse_size(text, option)
    if size < LEAST_LENT_BYTES:
        raise ValueError(
            f"{option}: {text!r} is {size} bytes, too few to lend; a size has a unit, such as 4GiB"
        )
    return size


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3". ValueError for anything else, and for none at all."""
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--prompt-ids: {text!r} is not a list of numbers such as 1,2,3") from None
    if min(ids) < 0:
        raise ValueError("--prompt-ids: a token id is 0 or more")
    return ids


def parse_bias(text: str) -> tuple[int, float]:
    """Token id and bias of "17=-2.5". ValueError for anything else."""
    token, separator, value = text.partition("=")
    try:
        if separator:
            return int(token), float(value)
    except ValueError:
        pass
    raise ValueError(f"--logit-bias: {text!r} is not of the form ID=VALUE, such as 17=-2.5")


def bootstrap_addresses(given: Sequence[str] | None, *, closed: bool = False) -> tuple[str, ...]:
    """The multiaddrs to join through. Each of `given` is a file or a multiaddr; with None the default file is read
    where there is one: in the working folder, else beside the package; not for a closed swarm, to which it does not
    lead. ValueError names the line or the option."""
    from fusion.swarm.directory import bootstrap

    if given is None and closed:
        return ()
    if given is None:
        found = next((path for path in _default_files() if path.is_file()), None)
        return bootstrap.load(found) if found else ()
    return tuple(dict.fromkeys(address for value in given for address in _resolved(value)))


def checked_peer(address: str | None) -> str | None:
    """ValueError for what is no address of a peer; dialling it is the real test."""
    from fusion.swarm.directory import bootstrap

    if address is not None and not bootstrap.is_address(address):
        raise ValueError(f"--peer: {address[:100]!r} is not a multiaddr ending in /p2p/<peer id>")
    return address


def _resolved(value: str) -> tuple[str, ...]:
    from fusion.swarm.directory import bootstrap

    if bootstrap.is_address(value.strip()):
        return (value.strip(),)
    if not value or not Path(value).exists():
        raise ValueError(f"--bootstrap: {value!r} is neither a file nor a multiaddr ending in /p2p/<peer id>")
    return bootstrap.load(Path(value))


def _default_files() -> tuple[Path, ...]:
    return Path(BOOTSTRAP_FILE), PACKAGE / BOOTSTRAP_FILE


def job_file(path: Path) -> Path:
    """The file that a user named; for `examples/...` in a folder without it, the one beside the package."""
    shipped = PACKAGE / path
    return shipped if path.parts[:1] == ("examples",) and not path.exists() and shipped.is_file() else path


def home_folder(home: Path) -> Path:
    """The home folder, absolute. ValueError where its name belongs to something else than a folder."""
    try:
        path = home.expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"--home: {home} is in the home of a user who has none here") from None
    near = next(each for each in (path, *path.parents) if each.exists())
    if not near.is_dir():
        raise ValueError(f"--home: {near} is not a folder")
    return path


def check_writable(folder: Path, trouble: str) -> None:
    """ValueError, which begins with `trouble`, where a folder cannot be made or written to."""
    near = next(each for each in (folder, *folder.parents) if each.exists())
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise ValueError(f"{trouble}: {near} is no folder that we can write to")


def peer_home(home: Path) -> Path:
    """As `home_folder`, of a peer that is to run: one line as well where it cannot be written to, has a bad key, or one runs
    there already."""
    from fusion.runtime.peer.keys import IDENTITY_FILE
    from fusion.swarm.identity import Identity
    from fusion.swarm.streams.p2pd import check_not_running

    folder = home_folder(home)
    check_writable(folder, "--home")
    if (folder / IDENTITY_FILE).exists():
        check_not_running(Identity.load(folder / IDENTITY_FILE))
    return folder


def listen_addresses(given: Sequence[str]) -> tuple[str, ...]:
    """ValueError for what cannot be a place to listen at, TransportError for one that is taken."""
    from fusion.swarm.streams.p2pd import check_ports

    try:
        check_ports(given)
    except ValueError as error:
        raise ValueError(f"--listen: {error}") from None
    return tuple(given)


def checked_rate(mbps: float, option: str) -> float:
    """ValueError for what is no rate, such as nan."""
    if not 0 < mbps < float("inf"):
        raise ValueError(f"{option}: a rate in megabits a second, above 0 and finite, not {mbps:g}")
    return mbps


def http_config(address: str, keys: Path | None) -> HttpConfig:
    """Of --http and --http-key. ValueError names the one that is wrong."""
    from fusion.runtime.serving.http.config import HttpConfig, parse_address, read_keys

    host, port = parse_address(address)
    return HttpConfig(host=host, port=port, keys=() if keys is None else read_keys(keys))


def admitted(who: Who | None, peers: Sequence[str]) -> AdmissionSpec:
    """Of --admission and --admit. ValueError for peer ids that do not go with it."""
    from fusion.runtime.job.admission import AdmissionSpec

    try:
        return AdmissionSpec(kind=(who or Who.open).value, peers=tuple(peers))
    except ValueError as error:
        raise ValueError(f"--admission, --admit: {error}") from None


def debug_asked(arguments: Sequence[str]) -> bool:
    """Whether --debug is on a command line that has not been parsed yet, or cannot be."""
    return "--debug" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def check_model_files(path: Path) -> None:
    """ValueError, in one line and before anybody is asked, where no model can be read from here."""
    from fusion.runtime.job.model_files import check_model

    check_model(path)
    if path.is_file():
        from fusion.runtime.capture.gguf.config import model_config
        from fusion.runtime.capture.gguf.header import read_header

        model_config(read_header(path))


def check_served_name(name: str) -> None:
    """ValueError where no model can be served under this name."""
    from fusion.runtime.job.manifest_wire import NAME_RULE, is_name

    if not is_name(name):
        raise ValueError(f"--name: {NAME_RULE}; such as my-model")


def may_be_job(source: str) -> bool:
    """Whether it may be a job's name, or a prefix of its id, where no such file exists."""
    from fusion.runtime.job.manifest_wire import is_name

    return is_name(source) and not source.lower().endswith((".gguf", ".safetensors"))


# --- options that travel together


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer reads it: in place of each parameter whose type is a dataclass, an option for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **made)

    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _fields_of(groups[name])
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def _fields_of(kind: Any) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
