"""An answer's text ends before the first stop text, wherever the borders between its pieces lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.runtime.serving.requests.stop import StopTexts

letters = st.text(alphabet="abé", max_size=30)
stops_of = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> str | None:
    """What is before the stop that ends first, the longest of those: None where there is none. By trying."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


def cut(text: str, lengths: list[int]) -> list[str]:
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]


@given(text=letters, stops=stops_of, lengths=st.lists(st.integers(0, 4), max_size=12))
def test_any_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], lengths: list[int]) -> None:
    found = StopTexts(stops)
    shown, given_ = "", ""
    for piece in cut(text, lengths):
        shown += found.push(piece)
        given_ += piece
        before = expected(given_, stops)
        assert found.found == (before is not None)
        if before is not None:
            assert shown == before
        else:  # nothing is held back but what may become a stop, and nothing of that is shown
            held = given_[len(shown) :]
            assert given_.startswith(shown) and len(held) == max(
                (n for stop in stops for n in range(len(stop)) if given_.endswith(stop[:n])), default=0
            )
    if not found.found:
        assert shown + found.finish() == text
    assert found.finish() == "" and (not found.found or found.push("more") == "")


def test_a_stop_over_several_pieces_is_held_back_and_never_shown() -> None:
    found = StopTexts(["</end>", "STOP"])
    assert [found.push(piece) for piece in ("a<", "/e", "x</", "end", "> b", "c")] == [
        "a",
        "",
        "</ex",
        "",
        "",
        "",
    ]
    assert found.found and found.finish() == ""


@pytest.mark.parametrize("stop", [("",), ("x" * 257,), ("é" * 129,), ("\udcff",), tuple(map(str, range(17)))])
def test_stops_are_checked_where_they_are_made(stop: tuple[str, ...]) -> None:
    with pytest.raises(JobError, match=r"^stop: "):
        GenerateRequest(prompt="a", stop=stop)
    assert GenerateRequest(prompt="a", stop=("é" * 128,) * 16).newer


@pytest.mark.parametrize("stop", ["END", [1], {"a": "b"}, [b"x"]])
def test_stops_off_the_wire_are_checked_for_their_type(stop: object) -> None:
    with pytest.raises(JobError, match=r"^stop: "):
        GenerateRequest.from_frame({"prompt": "text", "stop": stop}, memoryview(b"a"))
