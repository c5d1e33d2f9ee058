"""The figures of the serving bench: bounds, percentiles, verdicts, and answers as they arrive over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bench.serving.answer_times import Timed, percentile
from bench.serving.bounds import FirstTokenBound, RingBound
from bench.serving.http_answer import Busy, HttpAnswer, Refused
from bench.serving.load_verdict import faults, held, load_rows

GOOD: dict[str, Any] = {
    "clients": 8, "seconds": 3.0, "tokens_per_second": 100.0, "answers": 6, "busy": 1, "busy_without_retry": 0, "wrong": 0,
    "errors": [], "error_count": 0, "first_p50": 0.1, "first_p95": 0.2, "between_p50": 0.01, "between_p95": 0.02,
    "freed_seconds": 0.1, "resident_bytes": {"half": [100, 90], "end": [101, 90]}, "resident_growth": 1.01,
}  # fmt: skip


def test_a_token_goes_once_around_the_ring_and_through_every_stage() -> None:
    assert RingBound(stages=4, delay_ms=50, compute_seconds=0.012).seconds == pytest.approx(0.212)


def test_a_prompt_takes_as_long_as_the_slower_of_links_and_cores_and_the_way() -> None:
    given: dict[str, Any] = {
        "stages": 4, "delay_ms": 20, "rate_mbps": 100, "prompt_tokens": 1000, "position_bytes": 2048, "cores": 2,
    }  # fmt: skip
    linked = FirstTokenBound(**given, compute_seconds=0.1)
    assert linked.seconds == pytest.approx(0.08 + 8 * 1000 * 2048 / 100e6)
    computed = FirstTokenBound(**given, compute_seconds=3.0)
    assert computed.seconds == pytest.approx(0.08 + 1.5) and "over 2 cores" in str(computed)
    alone = FirstTokenBound(**{**given, "stages": 1}, compute_seconds=3.0)
    assert alone.seconds == pytest.approx(3.0)


def test_what_a_user_sees_of_an_answer() -> None:
    timed = Timed(10.0)
    for token, now in ((5, 10.5), (6, 10.6), (7, 10.6), (8, 10.8)):
        timed.add(token, now)
    assert timed.first_seconds == pytest.approx(0.5) and timed.token_seconds == pytest.approx(0.1)
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [
        1,
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


BAD = (
    ("steady", {"error_count": 2, "errors": ["Refused: 503"]}, "2 errors, such as Refused: 503"),
    ("steady", {"wrong": 1}, "other tokens"),
    ("steady", {"busy_without_retry": 1}, "Retry-After"),
    ("steady", {"freed_seconds": float("inf")}, "sessions stayed"),
    ("steady", {"answers": 0}, "no answer"),
    ("steady", {"resident_growth": 1.2}, "memory grew"),
    ("vanish", {"freed_seconds": 2.5}, "free after 2.5 s"),
    ("vanish", {"started": 7}, "7 of 8"),
    ("memory", {"answers": 7}, "7 of 8 answers"),
    ("abuse", {"share": 0.4}, "0.40 of its pace"),
)


def borne() -> dict[str, Any]:
    return {
        "steady": [dict(GOOD)],
        "vanish": {"clients": 8, "started": 8, "sessions": 16, "freed_seconds": 0.2},
        "memory": {**GOOD, "answers": 8, "longest_pause": 1.0},
        "abuse": {**GOOD, "streams": 64, "honest_alone": 50.0, "honest_beside": 40.0, "share": 0.8},
    }


def test_a_load_that_was_borne() -> None:
    assert held(borne()) and faults(borne()) == []
    assert not any("does not hold" in row for row in load_rows(borne()))


@pytest.mark.parametrize(("part", "change", "said"), BAD)
def test_whatever_does_not_hold_is_told(part: str, change: dict[str, Any], said: str) -> None:
    found = borne()
    (found[part][0] if part == "steady" else found[part]).update(change)
    [fault] = faults(found)
    assert said in fault and not held(found)
    assert any(fault in row for row in load_rows(found))


def read(text: str) -> list[int]:
    async def main() -> list[int]:
        reader = asyncio.StreamReader()
        reader.feed_data(text.encode())
        reader.feed_eof()
        return [token async for token in HttpAnswer(reader, None).tokens()]  # type: ignore[arg-type]

    return asyncio.run(main())


def chunked(*parts: str, status: str = "200 OK", ends: bool = True) -> str:
    body = "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts)
    return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n{body}" + ("0\r\n\r\n" if ends else "")


def event(*tokens: int) -> str:
    said = ",".join(f'"token_id:{token}"' for token in tokens)
    return f'data: {{"choices":[{{"text":"","logprobs":{{"tokens":[{said}]}}}}]}}\n\n'


LAST = 'data: {"choices":[{"text":"","logprobs":null}]}\n\n'


def test_tokens_come_whatever_the_chunks() -> None:
    whole = event(5) + event(6, 7) + LAST + "data: [DONE]\n\n"
    for size in (7, 40, 1000):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert read(chunked(*parts)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "before a status"),
        (chunked(event(5)), "before its end"),
        (chunked(event(5), ends=False), "within the stream"),
        (chunked('data: {"error":{"message":"no stage"}}\n\n'), "no stage"),
        (chunked('data: {"choices":[{"logprobs":{"tokens":["a"]}}]}\n\n'), "a token that is none"),
        ("HTTP/1.1 503 no\r\nRetry-After: 2\r\n\r\nnobody", "503: b'nobody'"),
    ],
)
def test_an_answer_that_is_cut_short_is_no_answer(text: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        read(text)


def test_a_busy_peer_says_when_to_come_back() -> None:
    for head, seconds in (("Retry-After: 2\r\n", 2.0), ("", None)):
        with pytest.raises(Busy) as busy:
            read(f"HTTP/1.1 429 Too Many Requests\r\n{head}\r\n")
        assert busy.value.retry_seconds == seconds
