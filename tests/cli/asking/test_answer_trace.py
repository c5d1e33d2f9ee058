"""Figures of an answer, from a clock that is told the time."""

from __future__ import annotations

import pytest

from fusion.cli.asking.answer_trace import AnswerTrace, route_lines, table
from fusion.runtime.serving.requests.request import Answer
from fusion.swarm.identity import Identity, friendly_name

ROUTE = tuple(Identity.generate().peer_id for _ in range(2))


def trace_of(*times: float) -> AnswerTrace:
    """Asked at 10 s; a token at each of `times`."""
    clock = iter((10.0, *times))
    trace = AnswerTrace(clock=lambda: next(clock))
    for _ in times:
        trace.token()
    return trace


def answer_of(tokens: int) -> Answer:
    return Answer(text="", tokens=(1,) * tokens, finish="length", prompt_tokens=7, route=ROUTE, seconds=1.0)


def test_times_are_counted_from_the_question_and_between_tokens() -> None:
    trace = trace_of(10.5, 10.75, 11.0, 12.5)
    assert trace.record() == {
        "first_token_seconds": 0.5,
        "tokens_per_second": 1.5,
        "gap_p50_seconds": 0.25,
        "gap_p95_seconds": 1.5,
    }
    assert table(trace, answer_of(4)).splitlines() == [
        "time to first token   500 ms",
        "tokens a second       1.5",
        "between tokens        p50 250 ms, p95 1.50 s",
        "tokens                4 after a prompt of 7",
        f"route                 stage 0  {friendly_name(ROUTE[0])}",
        f"                      stage 1  {friendly_name(ROUTE[1])}",
    ]


@pytest.mark.parametrize("times", [(), (10.5,)])
def test_what_an_answer_does_not_tell_is_left_open(times: tuple[float, ...]) -> None:
    trace = trace_of(*times)
    assert trace.tokens_per_second is None and trace.record()["gap_p95_seconds"] is None
    assert "tokens a second       -" in table(trace, answer_of(len(times)))


def test_a_route_goes_round() -> None:
    one, two = map(friendly_name, ROUTE)
    assert route_lines(ROUTE, (0.0031, None)) == [
        f"stage 0  {one}  3.1 ms to stage 1 and back",
        f"stage 1  {two}",
    ]
    assert route_lines(ROUTE[:1]) == [f"stage 0  {one}"]
