"""Every schedule finishes, whatever edges skip stages, and 1F1B holds no more than it says."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.placement.schedule import Action, gpipe, in_flight, one_f_one_b


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 7))
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    edges = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return (
        stages,
        edges,
        draw(st.integers(1, 12)),
        draw(st.integers(1, 3)),
        draw(st.randoms(use_true_random=False)),
    )


def run(schedules, edges, random):
    """Let stages advance in a random order, each as far as its inputs allow; the number of actions done by each."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(schedules)
    while True:
        ready = []
        for s, actions in enumerate(schedules):
            if at[s] == len(actions):
                continue
            kind, m = actions[at[s]].kind, actions[at[s]].microbatch
            if kind == "forward":
                waits = [("forward", a, m) for a, b in edges if b == s]
            else:
                waits = [("forward", s, m), *(("backward", b, m) for a, b in edges if a == s)]
            if done.issuperset(waits):
                ready.append(s)
        if not ready:
            return at
        s = random.choice(ready)
        action = schedules[s][at[s]]
        done.add((action.kind, s, action.microbatch))
        at[s] += 1


@settings(max_examples=examples(150))
@given(pipelines())
def test_one_f_one_b_never_deadlocks(pipeline):
    stages, edges, microbatches, depth, random = pipeline
    schedules = [one_f_one_b(s, stages, microbatches, depth) for s in range(stages)]
    assert run(schedules, edges, random) == [2 * microbatches] * stages


@settings(max_examples=examples(50))
@given(pipelines())
def test_gpipe_never_deadlocks(pipeline):
    stages, edges, microbatches, _, random = pipeline
    assert (
        run([gpipe(s, stages, microbatches) for s in range(stages)], edges, random)
        == [2 * microbatches] * stages
    )


def test_the_simulation_can_tell_a_deadlock():
    wrong = [
        one_f_one_b(0, 1, 4),
        one_f_one_b(0, 4, 4),
    ]  # the second stage wants more ahead than the first gives
    assert run(wrong, {(0, 1)}, Random(0)) != [8, 8]


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), st.data())
def test_each_microbatch_once_each_way_and_held_no_longer_than_said(stages, microbatches, depth, data):
    stage = data.draw(st.integers(0, stages - 1))
    actions = one_f_one_b(stage, stages, microbatches, depth)
    assert sorted(a.microbatch for a in actions if a.kind == "forward") == list(range(microbatches))
    assert [a.microbatch for a in actions if a.kind == "backward"] == list(range(microbatches))
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    assert most == in_flight(stage, stages, microbatches, depth)


def test_the_classic_pattern_of_the_first_of_two_stages():
    kinds = [(a.kind[0], a.microbatch) for a in one_f_one_b(0, 2, 3)]
    assert kinds == [("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2)]
    assert one_f_one_b(1, 2, 1) == (Action("forward", 0), Action("backward", 0))


@pytest.mark.parametrize("wrong", [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_arguments_are_checked(wrong):
    with pytest.raises(ValueError):
        one_f_one_b(*wrong)
