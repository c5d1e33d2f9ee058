"""The comparison of two reports."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from bench import exactness


def test_differences_are_told_by_place() -> None:
    one: dict[str, Any] = {
        "torch": "2",
        "job": {"losses": ["0x1", "0x2", "0x3"], "plan": {"cuts": [1]}, "states": ["a"]},
    }
    two = {**one, "job": {"losses": ["0x1", "0x4", "0x5"], "plan": {"cuts": [1]}, "states": []}}
    assert not [*exactness.differences(one, one)] and exactness.digest(one) != exactness.digest(two)
    assert [*exactness.differences(one, two)] == [
        "job / losses: 2 of 3, first number 1: 0x2 -> 0x4",
        "job / states: ['a'] -> []",
    ]


def test_answers_need_what_was_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--only", "answers"])
    with pytest.raises(SystemExit) as ended:
        exactness.main()
    assert ended.value.code == 2 and "answers need demo" in capsys.readouterr().err
