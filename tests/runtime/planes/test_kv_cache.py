"""The cache and the stages that decode with it."""

from __future__ import annotations

import pytest
import torch
from support.captured_once import captured_once
from torch.nn import functional

from fusion.dag.cutting.cuts import split
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.planes.attention import ScoreMods
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.sessions import Sessions
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

SLOT = (CacheShape(heads=2, width=8, dtype=torch.float32),) * 2


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    length = q.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (window or length))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 1, 11], [3, 17], [19, 1]])
def test_pieces_attend_as_the_whole_does(pieces: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    cache = SessionCache({7: SLOT}, 24, torch.device("cpu"))
    found = []
    at = 0
    for count in pieces:
        cache.begin(at, count)
        part = slice(at, at + count)
        found.append(cache.attend(q[:, :, part], (k[:, :, part], v[:, :, part]), 7, 0.3, window))
        cache.commit()
        at += count
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(found, 2), reference(q, k, v, window))


def scored_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scored: ScoreMods, window: int
) -> torch.Tensor:
    """In double precision, with the distance of each key from its own query."""
    q, k, v, bias = (t.double() for t in (q, k, v, bias))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    distance = torch.arange(q.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    assert scored.softcap is not None
    scores = scored.softcap * torch.tanh(0.3 * q @ k.transpose(2, 3) / scored.softcap)
    scores = scores + bias.transpose(2, 3)
    if scored.slopes is not None:
        scores = scores + torch.tensor(scored.slopes)[:, None, None] * distance
    scores = scores.masked_fill((distance > 0) | (distance <= -window), -torch.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if scored.sinks is not None:
        total = total + scored.sinks.double().exp()[:, None, None]
    return (weights / total @ v).float()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("most_scores", [1 << 22, 200, 40, 20])
@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 1, 11]])
def test_scores_that_are_not_plain_are_those_of_the_whole(
    pieces: list[int], most_scores: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.runtime.planes.attention.MAX_SCORES", most_scores)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6)
    bias = torch.randn(1, 4, 20, 1)
    row = torch.randn(4)
    scored = ScoreMods(row if sinks else None, 2.0, None if sinks else (0.5, 0.25, 0.1, 0.0))
    shapes = [CacheShape(t.shape[1], t.shape[3], t.dtype) for t in (k, v, bias)]
    found: dict[bool, torch.Tensor] = {}
    for singly in (False, True):
        cache, parts, at = SessionCache({3: shapes}, 24, torch.device("cpu")), [], 0
        for count in pieces:
            cache.begin(at, count, singly=singly)
            part = slice(at, at + count)
            new = [t[:, :, part] for t in (k, v, bias)]
            parts.append(cache.attend(q[:, :, part], new, 3, 0.3, 7, scored))
            cache.commit()
            at += count
        found[singly] = torch.cat(parts, 2)
        torch.testing.assert_close(found[singly], scored_reference(q, k, v, bias, scored, 7))
    other = SessionCache({3: shapes}, 24, torch.device("cpu"))
    assert other.copy(cache, 13) == 13 and other.bytes == cache.bytes


def test_attentions_of_several_kinds_with_one_window_see_the_same_positions() -> None:
    """In half precision more keys are read than are seen, in whole blocks; in float32, or with a cap, no more than these."""
    torch.manual_seed(0)
    x, window = torch.randn(1, 2, 604, 8), 7
    kinds = {0: (torch.bfloat16, None), 1: (torch.float32, None), 2: (torch.bfloat16, ScoreMods(softcap=2.0))}
    kinds |= {
        3: (torch.float32, ScoreMods(slopes=(0.1, 0.3))),
        4: (torch.bfloat16, ScoreMods(slopes=(0.1, 0.3))),
    }

    def run(slots: tuple[int, ...]) -> dict[int, torch.Tensor]:
        shapes = {slot: (CacheShape(2, 8, kinds[slot][0]),) * 2 for slot in slots}
        cache, found = SessionCache(shapes, 604, torch.device("cpu")), dict[int, torch.Tensor]()
        for start, end in ((0, 600), (600, 604)):
            cache.begin(start, end - start)
            for slot in slots:
                dtype, scored = kinds[slot]
                part = x[:, :, start:end].to(dtype)
                found[slot] = cache.attend(part, (part, part), slot, 0.3, window, scored)
            cache.commit()
        return found

    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0)):
        for slot, seen in run(order).items():
            assert torch.equal(seen, run((slot,))[slot])


def test_a_gap_or_too_many_positions_is_an_error() -> None:
    cache = SessionCache({0: SLOT}, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot go on at position 1"):
        cache.begin(1, 1)
    with pytest.raises(ValueError, match="room for 4 positions"):
        cache.begin(0, 5)


def test_memory_grows_with_the_sequence_and_nothing_is_lost() -> None:
    torch.manual_seed(0)
    count = 700
    q, k, v = torch.randn(1, 4, count, 8), torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)
    cache = SessionCache({7: SLOT}, 690, torch.device("cpu"))
    each = sum(kept.bytes(1) for kept in SLOT)
    assert cache.bytes == 0
    cache.reserve(65)
    assert cache.bytes == 128 * each
    cache.reserve(0)
    assert cache.bytes == 0
    found, sizes, at = [], set(), 0
    for pieces in (40, 1, 23, 1, 100, 400, 125):
        cache.begin(at, pieces)
        part = slice(at, at + pieces)
        found.append(cache.attend(q[:, :, part], (k[:, :, part], v[:, :, part]), 7, 0.3, None))
        cache.commit()
        sizes.add(cache.bytes // each)
        cache.reserve(0)  # what holds positions stays
        assert cache.bytes // each in sizes
        at += pieces
    assert at == 690 and sizes == {64, 128, 192, 576, 690}
    torch.testing.assert_close(torch.cat(found, 2), reference(q, k, v, None)[:, :, :690])


def gpt_stages() -> list[TorchDecodingStage]:
    torch.manual_seed(0)
    module = GPT(GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=32))
    graph = serving_graph(captured_once(module, training=False, maximum_sequence=32), maximum_sequence=32)
    variables = variables_from_module(module)
    stages = split(graph, [len(graph.nodes) // 2])
    return [TorchDecodingStage(s, variables) for s in stages]


def logits(stages: list[TorchDecodingStage], session: str, start: int, tokens: list[int]) -> torch.Tensor:
    values = {
        "input_ids": torch.tensor([tokens]),
        "position_ids": torch.arange(start, start + len(tokens))[None],
    }
    for stage in stages:
        values.update(*stage.run([Piece(session, start, values)]))
    return values["result/0"][0, -1]


def test_a_session_can_be_cut_back_and_run_on_otherwise() -> None:
    stages = gpt_stages()
    for stage in stages:
        stage.open("a", 16)
        stage.open("b", 16)
    logits(stages, "a", 0, [1, 2, 3, 4, 5])
    again = logits(stages, "a", 2, [9, 8])
    logits(stages, "b", 0, [7])  # another session in between changes nothing
    torch.testing.assert_close(again, logits(stages, "b", 0, [1, 2, 9, 8]))
    with pytest.raises(ValueError, match="cannot go on at position 9"):
        logits(stages, "a", 9, [1])


def test_memory_is_counted_as_it_is_set_aside_and_given_back() -> None:
    per_position = 2 * 16 * 4  # keys and values of one block, float32
    stage = gpt_stages()[0]
    stage.open("a", 12)
    stage.open("b", 32)
    assert stage.used_bytes() == 0
    assert stage.reserve("a", 3) and not stage.reserve("a", 12)
    assert stage.used_bytes() == 12 * per_position  # a block is larger than the session
    assert stage.reserve("b", 1) and stage.used_bytes() == 44 * per_position
    assert stage.reserve("b", 0) and stage.used_bytes() == 12 * per_position
    stage.close("a")
    stage.close("never opened")
    assert stage.used_bytes() == 0 and not stage.reserve("a", 5)
    with pytest.raises(ValueError, match="not open"):
        stage.run([Piece("a", 0, {})])


@pytest.mark.parametrize("moved", [True, False])
def test_what_was_retained_goes_on_as_if_it_had_been_read_anew(moved: bool) -> None:
    stages = gpt_stages()
    for stage in stages:
        assert stage.has_cache
        stage.open("a", 16)
    logits(stages, "a", 0, [1, 2, 3, 4, 5])
    for stage in stages:
        held, size = stage.retain("a", 7, 4)
        assert held == 4 and size == stage.used_bytes() == stage.retained_bytes() > 0
        if moved:
            assert stage.resume("b", 20, 7, 3) == 3 and not stage.retained_bytes()
        else:
            stage.open("b", 20)
            assert stage.copy(7, "b", 3) == 3 and stage.retained_bytes() == size
        stage.open("c", 20)
    found = logits(stages, "b", 3, [9, 8])
    torch.testing.assert_close(found, logits(stages, "c", 0, [1, 2, 3, 9, 8]))
    with pytest.raises(ValueError, match="cannot go on at position 9"):
        logits(stages, "b", 9, [1])
    if not moved:  # nor has the other one changed
        for stage in stages:
            assert stage.resume("d", 16, 7, 99) == 4
        torch.testing.assert_close(logits(stages, "d", 4, [8]), logits(stages, "c", 0, [1, 2, 3, 4, 8]))


def test_what_is_not_there_is_not_held() -> None:
    stage = gpt_stages()[0]
    stage.open("a", 16)
    assert stage.retain("a", 1, 99) == (0, 0) and stage.retain("a", 2, 99) == (0, 0)
    assert stage.resume("b", 16, 1, 5) == 0 and stage.copy(1, "b", 5) == 0 and stage.copy("x", "b", 5) == 0
    stage.forget(1)
    stage.clear()
    assert stage.used_bytes() == 0
    with pytest.raises(ValueError, match="not open"):
        stage.run([Piece("b", 0, {})])


def test_memory_may_be_counted_while_the_worker_opens_a_session() -> None:
    class Kept(SessionCache):
        @property
        def bytes(self) -> int:
            sessions.open(f"another {len(sessions._sessions)}", 4)
            return 5

    class Counted(Sessions[SessionCache]):
        def _new(self, capacity: int, source: int) -> SessionCache:
            return Kept({}, capacity, torch.device("cpu"))

    sessions = Counted()
    sessions.open("a", 4)
    assert sessions.used_bytes() == 5
