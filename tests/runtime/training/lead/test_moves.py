"""When a stage goes to an idle peer: where it has room, where it pays, and not back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fusion.dag.placement.codec_cost import DENSE
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.pipeline import Flow, Pipeline, StageLoad
from fusion.dag.placement.step_model import step_seconds
from fusion.runtime.training.lead.moves import EXPLAINED, LEAST_GAIN, PAUSE_SECONDS, WORTH, best_move, moved

MBIT = 1e6 / 8
NEED = 1000


def drawn(draw: random.Random, stages: int = 3, idle: int = 2) -> tuple[Pipeline, tuple[str, ...]]:
    names = [f"p{i}" for i in range(stages + idle)]
    devices = tuple(
        Device(
            peer=name, flops_per_second=10 ** draw.uniform(8, 11), memory_bytes=draw.choice((500, NEED, 5000)),
            up_bytes_per_second=10 ** draw.uniform(0.5, 3.5) * MBIT,
            down_bytes_per_second=10 ** draw.uniform(0.5, 3.5) * MBIT,
        )
        for name in names
    )  # fmt: skip
    links = {
        (a, b): Link(
            alpha_seconds=draw.uniform(0, 0.05), bytes_per_second=10 ** draw.uniform(0.5, 3.5) * MBIT
        )
        for a in names
        for b in names
        if a != b
    }
    pipe = chain(Network(devices=devices, links=links), names[:stages], 10 ** draw.uniform(-4, 0))
    return pipe, tuple(names[stages:])


def chain(network: Network, owners: list[str], compute: float) -> Pipeline:
    dense = DENSE["float32"]
    load = StageLoad(
        forward_seconds=compute / 3, backward_seconds=compute * 2 / 3, update_seconds=0.0, memory_bytes=NEED
    )
    return Pipeline(
        stages=(load,) * len(owners),
        flows=tuple(
            Flow(name=f"x{s}", producer=s, consumer=s + 1, elements=100_000, forward=dense, backward=dense)
            for s in range(len(owners) - 1)
        ),
        owners=tuple(owners),
        network=network,
        microbatches=4,
        training=True,
        schedule="1f1b",
        depth=2,
    )


def behind_a_slow_link() -> Pipeline:
    """Three stages and an idle peer; the links of the middle one are slow."""
    names = ["a", "b", "c", "idle"]
    links = {
        (x, y): Link(alpha_seconds=0.001, bytes_per_second=(5 if "b" in (x, y) else 100) * MBIT)
        for x in names
        for y in names
        if x != y
    }
    devices = tuple(Device(peer=name, flops_per_second=1e9, memory_bytes=2 * NEED) for name in names)
    return chain(Network(devices=devices, links=links), names[:3], 0.01)


def test_a_stage_behind_a_slow_link_goes_to_the_idle_peer() -> None:
    pipe = behind_a_slow_link()
    seconds = step_seconds(pipe).seconds
    move = best_move(pipe, ["idle"], state_bytes=(1000,) * 3, steps_left=1000, seconds=seconds)
    assert move is not None and (move.stage, move.peer) == (1, "idle")
    assert move.gain > 0.8 and move.cost_seconds == pytest.approx(PAUSE_SECONDS, abs=0.01)


def test_a_move_has_to_pay_for_itself() -> None:
    pipe = behind_a_slow_link()
    seconds = step_seconds(pipe).seconds
    how = {"steps_left": 1000, "seconds": seconds}
    assert best_move(pipe, ["idle"], state_bytes=(10**10,) * 3, **how) is None  # it takes hours to send
    assert best_move(pipe, ["idle"], state_bytes=(1000,) * 3, **{**how, "steps_left": 1}) is None
    # The clock says that the link is not as slow as that.
    assert best_move(pipe, ["idle"], state_bytes=(1000,) * 3, **{**how, "seconds": seconds / 20}) is None


def test_no_stage_moves_while_the_links_do_not_explain_what_the_clock_shows() -> None:
    pipe = behind_a_slow_link()
    how = {"state_bytes": (1000,) * 3, "steps_left": 1000}
    seconds = step_seconds(pipe).seconds
    assert best_move(pipe, ["idle"], **how, seconds=0.9 * seconds / EXPLAINED) is not None
    assert best_move(pipe, ["idle"], **how, seconds=1.1 * seconds / EXPLAINED) is None


def test_nothing_goes_anywhere_on_a_guess_or_without_room() -> None:
    pipe = behind_a_slow_link()
    how = {"state_bytes": (1000,) * 3, "steps_left": 1000, "seconds": step_seconds(pipe).seconds}
    assert best_move(pipe, ["idle"], **how, known=lambda a, b: {a, b} != {"idle", "c"}) is None
    small = tuple(replace(d, memory_bytes=NEED - 1) for d in pipe.network.devices)
    full = replace(pipe, network=replace(pipe.network, devices=small))
    assert best_move(full, ["idle"], **how) is None
    assert best_move(pipe, [], **how) is None


def test_a_peer_that_only_says_it_is_somewhat_faster_gets_nothing() -> None:
    pipe = behind_a_slow_link()
    links = {pair: Link(alpha_seconds=0.0, bytes_per_second=1e9) for pair in pipe.network.links}
    for times, moves in ((2.9, False), (4.0, True)):
        devices = tuple(
            replace(d, flops_per_second=1e9 * (times if d.peer == "idle" else 1))
            for d in pipe.network.devices
        )
        same = replace(
            chain(Network(devices=devices, links=links), ["b", "c"], 0.5),
            stages=(replace(pipe.stages[0], forward_seconds=1.0), pipe.stages[0]),
        )
        how = {"steps_left": 1000, "seconds": step_seconds(same).seconds}
        assert (best_move(same, ["idle"], state_bytes=(1000,) * 2, **how) is not None) == moves


def test_of_any_swarm_a_move_has_room_gains_and_is_not_taken_back() -> None:
    count = 0
    for seed in range(300):
        draw = random.Random(seed)
        pipe, idle = drawn(draw)
        state = [draw.randint(10**3, 10**8) for _ in pipe.stages]
        before, left = step_seconds(pipe).seconds, draw.randint(1, 10_000)
        move = best_move(pipe, idle, state_bytes=state, steps_left=left, seconds=before)
        if move is None:
            continue
        count += 1
        after = moved(pipe, move.stage, move.peer)
        assert pipe.network.device(move.peer).memory_bytes >= pipe.stages[move.stage].memory_bytes
        assert move.peer in idle and after.owners[move.stage] == move.peer
        saved = before - step_seconds(after).seconds
        assert saved >= LEAST_GAIN * before and saved * left > WORTH * move.cost_seconds
        others = [peer for peer in (*idle, pipe.owners[move.stage]) if peer != move.peer]
        again = best_move(
            after, others, state_bytes=state, steps_left=left, seconds=step_seconds(after).seconds
        )
        back = (move.stage, pipe.owners[move.stage])
        assert again is None or (again.stage, again.peer) != back, f"seed {seed}"
    assert count > 30
