from __future__ import annotations

import math

import pytest
import torch

from fusion.compression.codec import Encoded, codec
from fusion.compression.error_feedback import ErrorFeedback


def arrived(name: str, encoded: Encoded, shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    return codec(name).decode(memoryview(bytearray().join(encoded.buffers)), shape, dtype)


@pytest.mark.parametrize("name", ["int4", "topk:0.05", "topk:0.05:int8", "bf16"])
def test_over_many_steps_nothing_is_lost(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20, 30, generator=generator)
    feedback, plain, fed, sent = (
        ErrorFeedback(),
        torch.zeros(20, 30),
        torch.zeros(20, 30),
        torch.zeros(20, 30),
    )
    for _ in range(200):
        tensor = mean + 0.1 * torch.randn(20, 30, generator=generator)
        sent += tensor
        plain += arrived(name, codec(name).encode(tensor), (20, 30))
        fed += arrived(name, feedback.encode("edge", codec(name), tensor), (20, 30))
        feedback.commit()
    # What is missing at the end is the one residual, not a sum of 200 errors.
    assert torch.allclose(fed + feedback.state()["edge"], sent, atol=0.01)
    assert (fed - sent).norm() < 0.5 * (plain - sent).norm()


def test_a_discarded_step_sends_the_same_bytes_again() -> None:
    one, feedback = codec("topk:0.1"), ErrorFeedback()
    first, second = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    feedback.encode("a", one, first)
    feedback.commit()
    before = feedback.state()
    tried = [bytes(b) for b in feedback.encode("a", one, second).buffers]
    feedback.encode("a", one, first)
    feedback.discard()
    assert torch.equal(feedback.state()["a"], before["a"])
    assert [bytes(b) for b in feedback.encode("a", one, second).buffers] == tried


def test_a_successor_with_the_state_sends_the_same_bytes() -> None:
    one, feedback, successor = codec("int4"), ErrorFeedback(), ErrorFeedback()
    first, second = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    feedback.encode("a", one, first)
    feedback.commit()
    successor.encode("b", one, first)
    successor.commit()
    successor.load(feedback.state())
    assert list(successor.state()) == ["a"]
    ours, theirs = (f.encode("a", one, second).buffers for f in (feedback, successor))
    assert b"".join(ours) == b"".join(theirs)


def test_keys_do_not_mix_and_what_goes_whole_leaves_nothing() -> None:
    feedback = ErrorFeedback()
    feedback.encode("a", codec("topk:0.1"), torch.ones(100))
    feedback.encode("b", codec("none"), torch.ones(100))
    feedback.encode("c", codec("topk:0.1"), torch.ones(100, dtype=torch.int64))
    feedback.commit()
    assert list(feedback.state()) == ["a"]
    assert feedback.state()["a"].count_nonzero() == 90
    feedback.encode("d", codec("topk:0.1"), torch.ones(100))
    feedback.commit()
    assert list(feedback.state()) == ["a", "d"]


@pytest.mark.parametrize("whole", ["none", "topk:0.5"])
def test_a_tensor_that_goes_whole_pays_what_was_left_out(whole: str) -> None:
    """Of the dtype, too, where that rounds; topk that would not be smaller goes whole as well."""
    dtype = torch.float32 if whole == "none" else torch.float16
    name = str(dtype).removeprefix("torch.")
    feedback, generator = ErrorFeedback(), torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 3, generator=generator).to(dtype)
    assert codec(whole).cost(3, name) == codec("none").cost(3, name)
    sent = [arrived("int4", feedback.encode("a", codec("int4"), tensors[0]), (3,), name)]
    feedback.commit()
    (owed,) = feedback.state().values()
    assert owed.count_nonzero() and feedback.has("a") and not feedback.has("b")
    tried = feedback.encode("a", codec(whole), tensors[1])
    assert torch.equal(arrived(whole, tried, (3,), name), (tensors[1].float() + owed).to(dtype))
    assert torch.equal(feedback.state()["a"], owed)
    feedback.discard()
    again = feedback.encode("a", codec(whole), tensors[1])
    assert [bytes(b) for b in again.buffers] == [bytes(b) for b in tried.buffers]
    sent += [arrived(whole, again, (3,), name)]
    sent += [arrived(whole, feedback.encode("a", codec(whole), tensors[2]), (3,), name)]
    feedback.commit()
    if dtype == torch.float32:
        assert torch.equal(sent[2], tensors[2]) and not feedback.has("a") and feedback.state() == {}
    left = feedback.state().get("a", torch.zeros(3))
    missing = tensors[:3].double().sum(0) - torch.stack(sent).double().sum(0)
    assert torch.allclose(missing, left.double(), atol=1e-6) and left.abs().max() < 1e-3


@pytest.mark.parametrize("name", ["int8", "int4", "topk:0.3:int8"])
def test_what_is_added_does_not_overflow_the_dtype(name: str) -> None:
    tensor, feedback, one = torch.linspace(60000, 65504, 64).to(torch.float16), ErrorFeedback(), codec(name)
    for _ in range(6):
        assert arrived(name, feedback.encode("a", one, tensor), (64,), "float16").isfinite().all()
        feedback.commit()


def test_a_nan_is_sent_once() -> None:
    feedback, one = ErrorFeedback(), codec("topk:0.1")
    tensor = torch.ones(100)
    tensor[7] = math.nan
    assert arrived("topk:0.1", feedback.encode("a", one, tensor), (100,)).isnan().sum() == 1
    feedback.commit()
    assert feedback.state()["a"].isfinite().all()


def test_a_residual_of_another_shape_is_an_error() -> None:
    feedback = ErrorFeedback()
    feedback.load({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="the residual 'a' is"):
        feedback.encode("a", codec("int8"), torch.ones(100))
