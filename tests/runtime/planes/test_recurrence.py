"""The state of a recurrence in a cache: the bits of the whole, however a sequence comes and whatever is taken back."""

from __future__ import annotations

import pytest
import torch
from support import families

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.memory import MemoryConfig, measure_memory
from fusion.dag.ir.opset_recurrence import state_bytes
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.planes.kv_cache import CacheShape, SessionCache
from fusion.runtime.planes.recurrence import recurrence
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

LENGTH = 20
FLOAT = torch.float32


def tensors(beta: bool, rates: bool, length: int = LENGTH) -> list[torch.Tensor | None]:
    """query, key, value, decay, beta, rates: 4 heads over 2 key heads."""
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    return [
        some(1, 2, length, 8), some(1, 2, length, 8), some(1, 4, length, 6), -some(1, 4, length, 1 if rates else 8),
        some(1, 4, length, 1) if beta else None, some(4, 8) if rates else None,
    ]  # fmt: skip


def reference(given: list[torch.Tensor | None]) -> torch.Tensor:
    """In double precision, one head after the other."""
    q, k, v, decay, beta, rates = (None if t is None else t.double() for t in given)
    assert q is not None and k is not None and v is not None and decay is not None
    found = torch.zeros_like(v)
    for head in range(4):
        state = torch.zeros(8, 6, dtype=torch.float64)
        for t in range(v.shape[2]):
            rate = 1 if rates is None else rates[head]
            state = (decay[0, head, t] * rate).exp()[:, None] * state
            new = v[0, head, t]
            if beta is not None:
                new = beta[0, head, t] * (new - k[0, head // 2, t] @ state)
            state = state + torch.outer(k[0, head // 2, t], new)
            found[0, head, t] = q[0, head // 2, t] @ state
    return found


def cache(beta: bool, rates: bool) -> SessionCache:
    shapes = [CacheShape(2, 8, FLOAT), CacheShape(4, 6, FLOAT), CacheShape(4, 1 if rates else 8, FLOAT)]
    return SessionCache({3: (*shapes, *[CacheShape(4, 1, FLOAT)] * beta)}, 32, torch.device("cpu"))


def run(held: SessionCache, given: list[torch.Tensor | None], start: int, end: int) -> torch.Tensor:
    query, *kept, rates = given
    assert query is not None
    new = [t[:, :, start:end] for t in kept if t is not None]
    held.begin(start, end - start)
    found = held.recur(query[:, :, start:end], new, rates, 3)
    held.commit()
    return found


@pytest.mark.parametrize(("beta", "rates"), [(False, False), (True, False), (False, True)])
def test_pieces_have_the_bits_of_the_whole(beta: bool, rates: bool) -> None:
    given = tensors(beta, rates)
    whole = recurrence(*given)  # type: ignore[arg-type]
    torch.testing.assert_close(whole, reference(given).float())
    for pieces in ([LENGTH], [1] * LENGTH, [7, 1, 1, 11]):
        held, at, found = cache(beta, rates), 0, []
        for count in pieces:
            found.append(run(held, given, at, at + count))
            at += count
        assert torch.equal(torch.cat(found, 2), whole)


def test_positions_that_were_taken_back_leave_no_trace() -> None:
    given, other = tensors(True, False), tensors(True, False, LENGTH + 1)
    whole = recurrence(*given)  # type: ignore[arg-type]
    held = cache(True, False)
    run(held, given, 0, 9)
    run(held, other, 9, 13)  # tried
    assert torch.equal(run(held, given, 9, 12), whole[:, :, 9:12])  # all of them back
    assert torch.equal(run(held, given, 10, 12), whole[:, :, 10:12])  # some
    assert torch.equal(run(held, given, 4, 12), whole[:, :, 4:12])  # more than any state is kept of
    assert held.cut(6) == 6
    more = cache(True, False)
    assert more.copy(held, 5) == 5
    assert torch.equal(run(more, given, 5, 20), whole[:, :, 5:])
    assert torch.equal(run(held, given, 6, 20), whole[:, :, 6:])


def test_a_run_that_fails_leaves_no_state() -> None:
    given = tensors(True, False)
    held = cache(True, False)
    run(held, given, 0, 5)
    held.begin(5, 3)
    held.recur(given[0][:, :, 5:8], [t[:, :, 6:9] for t in given[1:5]], None, 3)  # type: ignore[index]
    assert torch.equal(run(held, given, 5, 8), recurrence(*given)[:, :, 5:8])  # type: ignore[arg-type]


@pytest.mark.heavy
def test_states_are_counted_from_the_first_on() -> None:
    graph, _ = families.made("mamba2", positions=64)
    (stage,) = split(graph, [])
    expected = sum(state_bytes(graph.types, node) for node in graph.nodes)
    layers = sum(node.op == "fusion.cached_recurrence" for node in graph.nodes)
    node = next(node for node in graph.nodes if node.op == "fusion.cached_recurrence")
    _, heads, _, wide = graph.types[node.args[2]].shape  # type: ignore[index]
    width = graph.types[node.args[1]].shape[3]  # type: ignore[index]
    assert expected == layers * 2 * heads * width * wide * 4  # type: ignore[operator]
    plane = TorchDecodingStage(stage, variables_from_module(families.made("mamba2", positions=64)[1]))
    plane.open("a", 64)
    assert plane.used_bytes() == expected
    table = measure_memory(graph, [0, len(graph.nodes)], {"batch": 1, "sequence": 64}, False, MemoryConfig())
    plane.reserve("a", 64)
    assert table.kept_bytes[0, 1] == plane.used_bytes()
