"""What a user sees of a wrong command line and of a failure: one line, the right exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from support.forked import Run, starter

from fusion.cli import enter, main, status
from fusion.cli.terminal import errors
from fusion.cli.terminal.options import PACKAGE
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.swarm.errors import IdentityError, PeerUnreachable

COMMANDS = ("start", "plan", "train", "jobs", "serve", "generate", "chat", "status", "demo")


def one_line(captured: str) -> str:
    lines = captured.splitlines()
    assert len(lines) == 1, captured
    assert lines[0].startswith("fusion-peer: ")
    return lines[0].removeprefix("fusion-peer: ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command} " in text


@pytest.mark.parametrize(
    "words", [[c] for c in COMMANDS] + [["jobs", c] for c in ("list", "watch", "stop", "export")]
)
def test_every_command_speaks_json_and_helps(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*words, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_no_words_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    assert "Usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fusion-peer ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["frobnicate"], "frobnicate"),
        (["start", "--frobnicate"], "--frobnicate"),
        (["start", "--threads", "0"], "--threads"),
        (["start", "--threads", "many"], "'--threads': 'many' is not a whole number."),
        (["generate", "x", "--temperature", "hot"], "'--temperature': 'hot' is not a number."),
        (["start", "--threads", "1025"], "--threads"),
        (["start", "--memory", "lots"], "--memory"),
        (["start", "--memory", "0GiB"], "--memory"),
        (["start", "--device", "abacus"], "--device"),
        (["start", "--listen", "localhost:80"], "--listen"),
        (["start", "--bootstrap", "no/such/file"], "--bootstrap"),
        (["start", "--http", "8080"], "--http"),
        (["start", "--http", "0.0.0.0:8080"], "--http-key"),
        (["start", "--http", "off", "--http-key", "keys"], "--http-key"),
        (["start", "--http-key", "no/such/file"], "no/such/file"),
        (["train"], "JOB.TOML"),
        (["plan"], "JOB.TOML"),
        (["plan", "job.toml"], "--swarm"),
        (["serve", "DIR"], "--name"),
        (["serve", "no/such/dir", "--name", "x"], "no/such/dir"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--prompt-ids", "1"], "PROMPT"),
        (["generate", "--prompt-ids", "1,two"], "--prompt-ids"),
        (["generate", "--prompt-ids", ""], "--prompt-ids"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "x", "--max-tokens", "9" * 23], "--max-tokens"),
        (["generate", "x", "--top-k", "9" * 23], "--top-k"),
        (["generate", "x", "--seed", "9" * 23], "seed"),
        (["serve", "DIR", "--name", "x", "--stages", "9" * 23], "--stages"),
        (["generate", "x", "--min-p", "2"], "min_p"),
        (["generate", "x", "--repetition-penalty", "0"], "repetition_penalty"),
        (["generate", "x", "--frequency-penalty", "3"], "frequency_penalty"),
        (["generate", "x", "--presence-penalty", "nan"], "presence_penalty"),
        (["generate", "x", "--logit-bias", "7"], "--logit-bias"),
        (["generate", "x", "--logit-bias", "x=1"], "--logit-bias"),
        (["generate", "x", "--logit-bias", "7=101"], "logit_bias"),
        (["generate", "x", "--logit-bias", "7=1", "--logit-bias", "7=2"], "logit_bias"),
        (["generate", "x", "--stop", ""], "stop"),
        (["generate", "x", "--logprobs", "21"], "top_logprobs"),
        (["chat", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "--max-tokens", "9" * 23], "--max-tokens"),
        (["chat", "--top-k", "9" * 23], "--top-k"),
        (["chat", "--min-p", "2"], "min_p"),
        (["chat", "--stop", ""], "stop"),
        (["chat", "one", "two"], "two"),
        (["jobs", "export", "name"], "DIR"),
        (["jobs", "dance"], "dance"),
        (["swarm-key"], "Missing command"),
        (["start", "--home", ""], "--home"),
        (["start", "--disk", "5"], "--disk"),
        (["demo", "--peers", "0"], "--peers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 2
    captured = capsys.readouterr()
    assert named in one_line(captured.err)
    assert captured.out == ""


def test_no_path_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: the working folder would be taken for it."""
    commands = [typer.main.get_command(main.program())]
    found = 0
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            kind = type(parameter.type).__name__
            assert "Path" not in kind, f"{command.name} {parameter.name}"
            found += kind == "FuncParamType"
    assert found >= len(COMMANDS)
    for words in (["train", ""], ["serve", "", "--name", "x"], ["jobs", "export", "x", ""]):
        assert main.main(words) == 2
        assert "a path, not ''" in one_line(capsys.readouterr().err)


def test_a_port_of_the_api_that_is_taken_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.runtime.peer.peer.open_peer", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main.main(["start", "--home", str(tmp_path), "--http", f"127.0.0.1:{port}"]) == 1
    assert f"--http: 127.0.0.1:{port}: Address already in use" in one_line(capsys.readouterr().err)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("draft", ["no/such/dir", "."])
def test_a_draft_that_is_no_model_is_named_before_anything_is_loaded(
    draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fusion.json", "inference.graph", "model.safetensors"):
        (tmp_path / name).touch()
    assert main.main(["serve", str(tmp_path), "--name", "x", "--draft", draft]) == 2
    assert one_line(capsys.readouterr().err).startswith(f"--draft: {draft} ")


JOB = """
name = "x"
[model]
kind = "gpt"
blocs = 3
[data]
files = ["*.toml"]
[train]
steps = 1
sequence = 8
"""


# Has imported what the installed command does before it knows its words.
SHELL = """
import socket, sys
from support.forked import serve
from fusion.cli import main

def refuse(*_): raise AssertionError("it went to the network")

def run(words):
    socket.socket.connect = socket.socket.connect_ex = refuse
    code = main.main(words)
    print(*{"torch", "transformers", "hivemind", "tokenizers", "safetensors", "grpc"} & set(sys.modules))
    return code

serve(run)
"""


@pytest.fixture(scope="module")
def shell() -> Iterator[Run]:
    """The command with these words, in a process of its own for each, and then what slow libraries it has loaded."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with starter([sys.executable, "-c", SHELL], {**os.environ, "PYTHONPATH": path}) as run:
        yield run


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train no.toml", "no.toml"),
        ("train job.toml", "blocs is not known"),
        ("train hf.toml", "no config.json"),
        ("train job.toml --bootstrap nofile", "blocs"),
        ("plan job.toml --swarm swarm.toml", "blocs"),
        ("plan good.toml --swarm swarm.toml", "peers[0]"),
        ("serve empty --name x", "no config.json"),
        ("serve config --name x", "no *.safetensors"),
        ("serve broken --name x", "cannot be read"),
        ("serve ./no --name x", "not a directory"),
        ("serve no.gguf --name x", "no.gguf is not a directory or a GGUF file"),
        (
            "serve emtpy --name x --bootstrap good.peers",
            "emtpy is not a directory or a GGUF file, and there is no peer",
        ),
        ("serve good.toml --name x", "not a GGUF file"),
        ("serve cut.gguf --name x", "it is not whole"),
        ("serve start.gguf --name x", "start.gguf ends in its version: it is not whole"),
        ("serve kindless.gguf --name x", "kindless.gguf does not say of what kind its model is"),
        ("serve other.gguf --name x", "a model of the kind 'rwkv7'"),
        ("serve cut --name x", "model.safetensors has 100 of its 5096 bytes: it is not whole"),
        ("serve cut/within --name x", "model.safetensors ends in its header: it is not whole"),
        ("serve empty --name x --once", "--once"),
        ("serve job --name my+model!", "--name: letters, digits"),
        ("generate x --top-p 3", "top_p"),
        ("generate x --peer foo", "--peer"),
        ("chat x --top-p 3", "top_p"),
        ("chat x --peer foo", "--peer"),
        ("chat --bootstrap nofile", "--bootstrap"),
        ("status --peer foo", "--peer"),
        ("status --home job.toml", "not a folder"),
        ("status --home job.toml/home", "job.toml is not a folder"),
        ("status --bootstrap nofile", "--bootstrap"),
        ("start --home kept", "kept/identity is empty"),
        ("start --home job.toml/home", "job.toml is not a folder"),
        ("start --listen /ip4/0.0.0.0/udp/0/quic-v1/webtransport", "--listen"),
        ("start --upload-mbps nan", "--upload-mbps"),
        ("jobs watch x --peer foo", "--peer"),
        ("jobs stop x --bootstrap nofile", "--bootstrap"),
        ("jobs export x .", "not an empty directory"),
        ("jobs export x job.toml/model", "job.toml is no folder"),
    ],
)
def test_bad_input_is_found_before_anything_slow_is_loaded(
    words: str, said: str, tmp_path: Path, shell: Run
) -> None:
    """A real process, which must not have loaded what takes seconds, nor have opened a socket of the network."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "good.toml").write_text(JOB.replace("blocs", "blocks"))
    (tmp_path / "hf.toml").write_text(JOB.replace('"gpt"\nblocs = 3', '"huggingface"\npath = "empty"'))
    (tmp_path / "swarm.toml").write_text("[[peers]]\n")
    (tmp_path / "good.peers").write_text("# nobody yet\n")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes([9] + [0] * 7) * 2)
    (tmp_path / "start.gguf").write_bytes(b"GGUF\3")
    (tmp_path / "kindless.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    kind = b"".join(struct.pack("<Q", len(t)) + t for t in (b"general.architecture", b"rwkv7"))
    kind = kind.replace(b"architecture", b"architecture" + struct.pack("<I", 8))
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + kind)
    for name, config in (("kept", None), ("empty", None), ("config", "{}"), ("broken", "{")):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "kept" / "identity").touch(0o600)
    within = tmp_path / "cut" / "within"
    within.mkdir(parents=True)
    header = b'{"w": {"dtype": "F32", "shape": [1250], "data_offsets": [0, 5000]}}'.ljust(88)
    for folder, bytes_there in ((within, 40), (within.parent, 100)):
        (folder / "config.json").write_text("{}")
        whole = len(header).to_bytes(8, "little") + header + bytes(5000)
        (folder / "model.safetensors").write_bytes(whole[:bytes_there])
    home = [] if "--home" in words or words.startswith("plan") else ["--home", "home"]
    done = shell(*words.split(), *home, folder=str(tmp_path))
    assert done[:2] == (2, "\n") and not (tmp_path / "home").exists(), done
    assert said in one_line(done[2])


def test_a_job_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["train", str(tmp_path / "job.toml"), "--json"]) == 2
    assert "job.toml" in one_line(capsys.readouterr().err)


def test_export_does_not_write_over_anything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    assert main.main(["jobs", "export", "name", str(tmp_path)]) == 2
    assert "not an empty directory" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("steps must be at least 1"), 2, "steps must be at least 1"),
        (JobError("model.path: no config.json"), 2, "model.path: no config.json"),
        (IdentityError("identity file x is empty; remove it"), 2, "identity file x is empty; remove it"),
        (PeerUnreachable("nobody answers at /ip4/x"), 1, "nobody answers at /ip4/x"),
        (JobFailed("stage 2: out of memory"), 1, "stage 2: out of memory"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 2, "No such file or directory: a/b"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aa"), 2, "File name too long: aa"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            KeyError("secret"),
            1,
            "KeyError: 'secret' (a mistake of ours; run it again with --debug for the details)",
        ),
        (
            ZeroDivisionError(),
            1,
            "ZeroDivisionError (a mistake of ours; run it again with --debug for the details)",
        ),
        (ExceptionGroup("many", [ValueError("first")]), 2, "first"),
    ],
)
def test_each_failure_has_its_line_and_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(status, "run", raising(error))
    assert main.main(["status"]) == code
    assert one_line(capsys.readouterr().err) == said


def test_a_working_folder_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["start", "--home", "home"]) == 2
    assert one_line(capsys.readouterr().err) == "the working folder is gone: No such file or directory"


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "run", raising(KeyError("secret")))
    assert main.main(["status", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [BrokenPipeError(), ExceptionGroup("many", [BrokenPipeError()])])
def test_a_reader_who_has_had_enough_hears_no_more(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(status, "run", raising(error))
    assert main.main(["status"]) == 1 and stderr.closed


def raising(error: BaseException) -> Callable[..., None]:
    def run(work: object, **_: object) -> None:
        work.close()  # type: ignore[attr-defined]
        raise error

    return run


def test_what_cannot_be_told_has_its_code_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")  # of a terminal that was closed

    monkeypatch.setattr(sys, "stderr", Gone())
    assert main.main(["start", "--threads", "0"]) == 2


@given(st.text())
def test_text_from_elsewhere_is_one_printable_line(text: str) -> None:
    line = errors.one_line(text)
    assert "\n" not in line and "\x1b" not in line and len(line) <= 500
    assert line.isprintable()


@pytest.mark.process
@pytest.mark.parametrize(
    ("interrupts", "number"),
    [
        ("SIG_DFL", signal.SIGINT),
        ("SIG_DFL", signal.SIGTERM),
        ("SIG_IGN", signal.SIGTERM),
        ("SIG_DFL", signal.SIGHUP),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM, in a shell's background", "a terminal that is closed"],
)
def test_the_installed_command_and_interruption(interrupts: str, number: signal.Signals) -> None:
    """A real process: a signal in the middle of a command ends it with 130 and one line."""
    code = (
        "import asyncio, sys\n"
        "from fusion.cli import main, status\n"
        "from fusion.cli.terminal.loop import run\n"
        "async def wait():\n"
        "    try:\n"
        "        print('waiting', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "    finally:\n"
        "        print('closed', flush=True)\n"
        "def again(work, debug): work.close(); return run(wait())\n"
        "status.run = again\n"
        "sys.exit(main.main(['status']))\n"
    )
    # What a process does with SIGINT it has from whoever started it.
    start = f"import os, signal, sys; signal.signal(signal.SIGINT, signal.{interrupts}); os.execv(sys.executable, sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", start, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "closed\n", "fusion-peer: interrupted\n")


@pytest.mark.process
def test_an_interruption_while_the_command_is_imported_is_a_line_as_well() -> None:
    """Ctrl-C comes in the middle of an import, which is most of what a command does in its first moments."""
    code = (
        "import signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fusion.cli import enter\n"
        "sys.exit(enter())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fusion-peer: interrupted\n")


def test_the_installed_command_enters_there() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"fusion-peer": f"{enter.__module__}:{enter.__qualname__}"}


@pytest.mark.process
def test_help_is_quick() -> None:
    """No assertion on time: that nothing heavy is loaded is asserted in test_layering; this runs the real command."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "generate" in done.stdout, (done, time.monotonic() - started)


@pytest.mark.process
@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_no_socket_is_given_the_number_of_a_stream_that_was_closed(closed: list[int]) -> None:
    """As `>&-` does: text that is printed would go into the socket, and libuv aborts when it closes one."""
    code = (
        "import asyncio, os, sys\n"
        "from fusion.cli import enter, main, status\n"
        "from fusion.cli.terminal.loop import run\n"
        "async def work(): print('said'); print('told', file=sys.stderr)\n"
        "def again(coroutine, debug): coroutine.close(); return run(work())\n"
        "status.run, sys.argv = again, ['fusion-peer', 'status']\n"
        "os._exit(enter() or not all(map(os.get_inheritable, range(3))))\n"
    )
    start = f"import os, sys; [os.close(n) for n in {closed}]; os.execv(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", start, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    said, told = ("" if 1 in closed else "said\n"), ("" if 2 in closed else "told\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, said, told)


@pytest.mark.process
@pytest.mark.parametrize(
    "words", ["status", "serve model --name x", "jobs export x new", "generate x", "models"]
)
def test_without_a_peer_to_join_through_nothing_slow_is_loaded(words: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("fusion.json", "inference.graph", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "bootstrap_peers.txt").touch()
    code = (
        "import sys\n"
        "from fusion.cli import main\n"
        "code = main.main(sys.argv[1:])\n"
        "print(*{'torch', 'hivemind', 'tokenizers', 'safetensors'} & set(sys.modules))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split(), "--home", "home"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "\n")
    assert done.stderr.startswith("fusion-peer: no peer to join through")
    assert not (tmp_path / "home").exists()


@pytest.mark.process
@pytest.mark.parametrize("words", [["--version"], []])
@pytest.mark.parametrize(
    ("sink", "said"), [("/dev/full", "fusion-peer: No space left on device\n"), ("pipe", "")]
)
def test_what_was_printed_and_went_nowhere_is_told_once(words: list[str], sink: str, said: str) -> None:
    """Python itself would end with 120, and an exception that it ignores, once it has written what was printed last."""
    if sink == "pipe":
        reads, writes = os.pipe()
        os.close(reads)
    elif not Path(sink).exists():
        pytest.skip("this system has no such device")
    else:
        writes = os.open(sink, os.O_WRONLY)
    command = [sys.executable, "-m", "fusion.cli.main", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=writes, stderr=subprocess.PIPE, text=True, env=buffered, check=False
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no such device")
def test_what_could_not_be_told_leaves_the_exit_code_alone() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "fusion.cli.main", "start", "--threads", "0"]
        assert subprocess.run(command, stderr=full, check=False).returncode == 2


@pytest.mark.process
@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
    ids=["C", "ASCII"],
)
def test_a_character_that_the_output_has_not_is_a_question_mark(locale: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from fusion.cli import main, status\n"
        "def said(work, debug): work.close(); print('caf\\u00e9')\n"
        "status.run = said\n"
        "sys.exit(main.main(['status']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **locale}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf?\n", b"")
