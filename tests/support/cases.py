"""Many small cases in one test, for checks that are faster than pytest collects a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def check_all(
    cases: Iterable[Case], check: Callable[[Case], object], name: Callable[[Case], object] = str
) -> None:
    """Check every case, also after one has failed. AssertionError with each that failed and why."""
    failed = []
    for case in cases:
        try:
            check(case)
        except (
            Exception
        ) as error:  # a case that breaks down has failed, and the others are still to be checked
            failed.append(f"{name(case)}: {type(error).__name__}: {error}")
    assert not failed, "\n".join([f"{len(failed)} failed", *failed])
