"""Which snapshots of a job are served: the newest, none twice, not all of them, and the last in any case."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.launch.snapshot_turns import REST, Seen, rest_until, turn


@given(
    st.none() | st.integers(0, 9),
    st.booleans(),
    st.none() | st.integers(0, 9),
    st.floats(0, 9),
    st.floats(0, 9),
)
def test_only_what_is_newer_is_served(
    snapshot: int | None, over: bool, served: int | None, now: float, rested: float
) -> None:
    found = turn(Seen(snapshot_step=snapshot, over=over), served, now, rested)
    newer = snapshot is not None and (served is None or snapshot > served)
    if found == "serve":
        assert newer and (served is None or over or now >= rested)
    else:
        assert found == ("end" if over else "wait")
        assert not newer or (now < rested and served is not None)


def test_one_that_could_not_be_served_is_left_out_until_it_is_the_last() -> None:
    def found(step: int, tried: int, *, over: bool) -> str:
        return turn(Seen(snapshot_step=step, over=over), 10, 9.0, 0.0, tried=tried)

    assert [found(20, 20, over=False), found(30, 20, over=False)] == ["wait", "serve"]
    assert [found(20, 20, over=True), found(10, 20, over=True)] == ["serve", "end"]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=30),
    st.floats(0.5, 20.0),
)
def test_handing_over_takes_a_share_of_the_time_and_the_last_is_served(steps: list[int], took: float) -> None:
    """A job that takes a snapshot a second, at rising steps, and is over then."""
    snapshots = sorted(steps)
    now, rested, busy = 0.0, 0.0, 0.0
    served: list[int] = []
    while True:
        over = now >= len(snapshots)
        step = snapshots[-1] if over else snapshots[int(now)]
        what = turn(Seen(snapshot_step=step, over=over), served[-1] if served else None, now, rested)
        if what == "end":
            break
        if what == "serve":
            served.append(step)
            rested = rest_until(now, now + took)
            busy += took
            now += took
        else:
            now += 0.25
    assert served[-1] == snapshots[-1] and served == sorted(set(served))
    # The first and the last are served without a rest before them.
    assert busy <= 3 * took + now / (1 + REST)
