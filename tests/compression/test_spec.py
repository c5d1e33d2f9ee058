from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.compression.codec import codec
from fusion.compression.spec import MAX_MILLIONTHS, MIN_MILLIONTHS, PLAIN, Spec, parse


@given(st.integers(MIN_MILLIONTHS, MAX_MILLIONTHS), st.sampled_from(("fp16", "int8")))
def test_every_density_has_one_spelling(millionths: int, values: str) -> None:
    spec = Spec(family="topk", millionths=millionths, values="int8" if values == "int8" else "fp16")
    assert parse(str(spec)) == spec
    assert codec(str(spec)).name == str(spec)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("topk:0.010", "topk:0.01"), ("topk:0.5:fp16", "topk:0.5"), ("topk:0.0001:int8", "topk:0.0001:int8")],
)
def test_other_spellings_are_read(text: str, canonical: str) -> None:
    assert str(parse(text)) == codec(text).name == canonical


@pytest.mark.parametrize("text", PLAIN)
def test_plain_codecs_are_their_names(text: str) -> None:
    assert str(parse(text)) == codec(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "None",
            " none",
            "none ",
            "none\n",
            "fp32",
            "topk",
            "topk:",
            "topk:0",
            "topk:1",
            "topk:.1",
            "topk:1e-3",
        ),
        *(
            "topk:0.1:",
            "topk:0.1:fp32",
            "topk:0.1:int8:int8",
            "topk:0.1\n",
            "topk:-0.1",
            "topk:nan",
            "topk:0.0000001",
        ),
        *(
            "topk:0.51",
            "topk:0.00009",
            "topk:0.0",
            "topk:٠.١",
            "topk:0.١",
            "x" * 100_000,
            "int8\x00",
            "int8:64",
        ),
    ],
)
def test_hostile_spellings_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        codec(text)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


@given(st.integers(0, 100_000), st.integers(MIN_MILLIONTHS, MAX_MILLIONTHS - 1), st.sampled_from((2, 4)))
def test_more_density_never_costs_less(elements: int, millionths: int, itemsize: int) -> None:
    here = Spec(family="topk", millionths=millionths)
    more = Spec(family="topk", millionths=millionths + 1)
    assert here.payload_bytes(elements, itemsize) <= more.payload_bytes(elements, itemsize)
    assert here.payload_bytes_at(elements, itemsize) <= here.payload_bytes(elements, itemsize)
