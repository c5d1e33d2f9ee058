"""A user's Python file: what goes wrong in it is one line that names the file and the line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusion.runtime.capture.python.python_file import PythonFile
from fusion.runtime.job.errors import JobError


def written(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_runs_and_imports_what_lies_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "SIZE = 3\n", "beside_it.py")
    text = "from dataclasses import dataclass\nfrom beside_it import SIZE\n@dataclass\nclass A:\n    x: int = SIZE\nprint('hello')\n"
    before = list(sys.path)
    file = PythonFile(written(tmp_path, text))
    with file.running():
        assert file.function("A")().x == 3
    assert sys.path == before
    said = capsys.readouterr()
    assert said.out == "" and "hello" in said.err  # the output of a command may be JSON
    sys.modules.pop("beside_it")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = x +\n", "model.py:2: SyntaxError: invalid syntax"),
        (
            "x = 1\nimport nowhere_at_all\n",
            "model.py:2: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("def f():\n    return 1 / 0\nf()\n", "model.py:2: ZeroDivisionError: division by zero"),
        ("raise ValueError('first\\nsecond')\n", "model.py:1: ValueError: first"),
        ("import sys\nsys.exit(3)\n", "model.py:2: SystemExit: 3"),
        ("import json\njson.loads('{')\n", "model.py:2: JSONDecodeError: "),
        ("x = '\0'\n", "model.py"),
    ],
)
def test_an_error_of_the_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(JobError) as error:
        PythonFile(written(tmp_path, text))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_error_of_a_function_names_its_line(tmp_path: Path) -> None:
    file = PythonFile(written(tmp_path, "\n\ndef model(size):\n    return [0][size]\n"))
    with pytest.raises(JobError, match=r"model\.py:4: IndexError"), file.running():
        file.function("model")(5)


def test_a_file_may_change_where_it_imports_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = (
        "import sys\nsys.path = [each for each in sys.path if each != sys.path[0]]\ndef f(): return 1 / 0\n"
    )
    file = PythonFile(written(tmp_path, text))
    with pytest.raises(JobError, match=r"model\.py:3: ZeroDivisionError"), file.running():
        sys.path.remove(str(tmp_path))
        file.function("f")()


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    file = PythonFile(written(tmp_path, "import json\ndef make(): pass\nclass Net: pass\n"))
    with pytest.raises(JobError, match=r"has no function model \(it has: make, Net\)"):
        file.function("model")


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"must end in \.py"):
        PythonFile(written(tmp_path, "x = 1\n", "model.txt"))
