from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusion.runtime.job.fields import build


@dataclass(frozen=True)
class Inner:
    a: int = 0


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = Inner()
    more: tuple[Inner, ...] = ()


def test_a_user_is_told_of_every_key_that_means_nothing() -> None:
    with pytest.raises(ValueError, match="mood is not known here"):
        build(Outer, {"name": "x", "mood": 1})
    with pytest.raises(ValueError, match=r"inner\.mood is not known here"):
        build(Outer, {"name": "x", "inner": {"mood": 1}})


def test_what_a_newer_peer_adds_to_a_message_is_passed_over() -> None:
    value = {"name": "x", "mood": 1, "inner": {"a": 2, "mood": 1}, "more": [{"b": 1}, {"a": 3}]}
    assert build(Outer, value, known_only=True) == Outer("x", Inner(2), (Inner(), Inner(3)))
    with pytest.raises(ValueError, match="name is missing"):
        build(Outer, {"mood": 1}, known_only=True)
    with pytest.raises(ValueError, match=r"inner\.a must be a whole number"):
        build(Outer, {"name": "x", "inner": {"a": "1"}}, known_only=True)
