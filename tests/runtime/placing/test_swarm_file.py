"""swarm.toml: what it says of every pair, and one line for everything that is wrong with it."""

from __future__ import annotations

import contextlib
import math
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.placing.swarm_file import load, parse

NETWORKS = Path(__file__).resolve().parents[2] / "box" / "networks"
TWO = (
    '[[peers]]\nname = "a"\ngflops = 1\nmemory = "1GiB"\n[[peers]]\nname = "b"\nmflops = 500\nmemory = 1024\n'
)


def rtts(swarm):
    return {swarm.pair(a.name, b.name).rtt_ms for a, b in permutations(swarm.peers, 2)}


def test_peers_with_their_units():
    swarm = parse(TWO + "up_mbps = 8\nmemory_gb_per_second = 2\n")
    a, b = swarm.network().devices
    assert (a.peer, a.flops_per_second, a.memory_bytes, a.memory_bytes_per_second) == ("a", 1e9, 1 << 30, 8e9)
    assert (b.flops_per_second, b.memory_bytes, b.memory_bytes_per_second) == (5e8, 1024, 2e9)
    assert (a.up_bytes_per_second, b.up_bytes_per_second, b.down_bytes_per_second) == (
        math.inf,
        1e6,
        math.inf,
    )


def test_a_pair_that_nothing_names_is_a_home_uplink_and_said_to_be_unknown():
    swarm = parse(TWO)
    assert swarm.pair("a", "b").rtt_ms == 40 and swarm.pair("a", "b").mbps == 10
    assert not swarm.pair("a", "b").known
    assert parse(TWO + "[default]\nrtt_ms = 3\n").pair("b", "a").known


def test_links_go_both_ways_or_one_way():
    both = parse(
        TWO + '[[links]]\nbetween = ["a", "b"]\nmbps = 80\nrtt_ms = 20\nqueue_ms = 50\nloss = 0.01\n'
    )
    pair = both.pair("b", "a")
    assert pair == both.pair("a", "b")
    assert (pair.mbps, pair.rtt_ms, pair.queue_ms, pair.loss, pair.known) == (80, 20, 50, 0.01, True)
    link = both.network().link("a", "b")
    assert (link.alpha_seconds, link.bytes_per_second) == (0.01, 10e6)
    one = parse(
        TWO + '[[links]]\nfrom = "a"\nto = "b"\nmbps = 80\nrtt_ms = 20\n[default]\nmbps = 1\nrtt_ms = 0\n'
    )
    assert (one.pair("a", "b").mbps, one.pair("b", "a").mbps) == (80, 1)


SITES = """
[[sites]]
name = "lab"
mbps = 1000
rtt_ms = 1
[[sites]]
name = "home"
rtt_ms = 2
[[peers]]
name = "l1"
site = "lab"
gflops = 1
memory = "1GiB"
rtt_ms = 5
[[peers]]
name = "l2"
site = "lab"
gflops = 1
memory = "1GiB"
[[peers]]
name = "h1"
site = "home"
gflops = 1
memory = "1GiB"
[[links]]
between = ["lab", "home"]
mbps = 80
rtt_ms = 20
"""


def test_sites_say_it_once_for_all_their_pairs():
    swarm = parse(SITES)
    assert (swarm.pair("l1", "l2").mbps, swarm.pair("l1", "l2").rtt_ms) == (1000, 1)
    assert swarm.pair("l2", "h1").rtt_ms == 20
    assert swarm.pair("h1", "l1").rtt_ms == 25  # the peer's own way is added outside its site


def test_what_names_the_peers_themselves_wins():
    swarm = parse(
        SITES
        + '[[links]]\nfrom = "l1"\nto = "home"\nrtt_ms = 7\n[[links]]\nbetween = ["l1", "l2"]\nrtt_ms = 9\n'
    )
    assert (swarm.pair("l1", "h1").rtt_ms, swarm.pair("h1", "l1").rtt_ms) == (12, 25)
    assert (swarm.pair("l1", "l2").rtt_ms, swarm.pair("l1", "l2").mbps) == (9, math.inf)


def test_the_links_of_a_network_are_a_mapping_of_every_pair():
    network = parse(SITES).network()
    assert len(network.links) == 6 == len(set(network.links))
    assert all(network.links[pair] == network.link(*pair) for pair in network.links)
    assert ("l1", "l1") not in network.links and ("l1", "x") not in network.links


def test_a_swarm_of_ten_thousand_is_read_without_its_hundred_million_pairs():
    peers = "".join(
        f'[[peers]]\nname = "p{i}"\nsite = "s{i % 100}"\ngflops = 9\nmemory = 4096\n' for i in range(10_000)
    )
    sites = "".join(f'[[sites]]\nname = "s{i}"\nmbps = 100\nrtt_ms = 5\n' for i in range(100))
    swarm = parse(peers + sites + "[default]\nmbps = 20\nrtt_ms = 50\n")  # fmt: skip
    assert len(swarm.network().links) == 99_990_000
    assert swarm.pair("p0", "p100").rtt_ms == 5 and swarm.pair("p0", "p1").rtt_ms == 50


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_our_networks(name):
    swarm = load(NETWORKS / f"{name}.toml")
    assert len(swarm.peers) == 6
    assert all(swarm.pair(a.name, b.name).known for a, b in permutations(swarm.peers, 2))
    seen = rtts(swarm)
    assert (min(seen), max(seen)) == {"a": (1, 20), "b": (10, 60), "c": (0.2, 40)}[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no peer: add a \[\[peers\]\]"),
        ("peers = 3", r"peers must be tables, each under \[\[peers\]\]"),
        ("[[peers]\n", "not TOML: .* line 1"),
        ("a = " + "[" * 5000, "not a swarm|not TOML"),
        ("speed = 3\n" + TWO, "speed is not known here .known: default, links, peers, sites."),
        (TWO + "colour = 3\n", r"peers\[1\].colour is not known here .known: count, device, down_mbps"),
        (TWO.replace("gflops = 1\n", ""), r"peers\[0\].gflops .or mflops. must be set"),
        (
            TWO.replace("gflops = 1\n", "gflops = -5\n"),
            r"peers\[0\].gflops must be above 0 and finite, not -5",
        ),
        (
            TWO.replace("gflops = 1\n", "gflops = nan\n"),
            r"peers\[0\].gflops must be above 0 and finite, not nan",
        ),
        (
            TWO.replace("gflops = 1\n", 'gflops = "fast"\n'),
            r"peers\[0\].gflops must be a number, not str 'fast'",
        ),
        (TWO.replace("gflops = 1\n", "gflops = true\n"), r"peers\[0\].gflops must be a number"),
        (TWO.replace('"1GiB"', '"4 cows"'), r"peers\[0\].memory: '4 cows' is not a size such as 4GiB"),
        (TWO.replace("1024", "0"), r"peers\[1\].memory must be a size such as 4GiB, not 0"),
        (TWO.replace('"1GiB"', '"' + "9" * 400 + '"'), r"peers\[0\].memory: '9*.* is not a size"),
        (TWO.replace('name = "b"\n', ""), r"peers\[1\].name is missing"),
        (TWO.replace('"b"', '""'), r"peers\[1\].name must be text of 1 to 100"),
        (TWO.replace('"b"', '"a"'), r"peers\[1\].name: 'a' is taken"),
        (TWO + "up_mbps = 0\n", r"peers\[1\].up_mbps must be above 0 and finite, not 0"),
        (TWO + "rtt_ms = -1\n", r"peers\[1\].rtt_ms must be 0 or more and finite, not -1"),
        (
            TWO + 'site = "lab"\n',
            r"peers\[1\].site: no \[\[sites\]\] is called 'lab' .sites: there are none.",
        ),
        (TWO + '[[sites]]\nname = "a"\nrtt_ms = 1\n', r"peers\[0\].name: 'a' is taken"),
        (TWO + "[[sites]]\nrtt_ms = 1\n", r"sites\[0\].name must be text"),
        (
            TWO + '[[links]]\nbetween = ["a"]\nrtt_ms = 1\n',
            r"links\[0\].between must name two peers or sites",
        ),
        (TWO + '[[links]]\nbetween = ["a", "c"]\nrtt_ms = 1\n', r"links\[0\]: no peer and no site .* 'c'"),
        (TWO + '[[links]]\nbetween = ["a", "a"]\nrtt_ms = 1\n', r"links\[0\] must join two, not a with"),
        (TWO + '[[links]]\nfrom = "a"\nrtt_ms = 1\n', r"links\[0\] must have between = .*, or from"),
        (TWO + '[[links]]\nbetween = ["a", "b"]\nmbps = 3\n', r"links\[0\].rtt_ms is missing"),
        (
            TWO + '[[links]]\nbetween = ["a", "b"]\nrtt_ms = 1\nmbps = -3\n',
            r"links\[0\].mbps must be above 0",
        ),
        (
            TWO + '[[links]]\nbetween = ["a", "b"]\nrtt_ms = 1\nloss = 1.0\n',
            r"links\[0\].loss must be from 0",
        ),
        (TWO + '[[links]]\nbetween = ["a", "b"]\nrtt_ms = 1\n' * 2, r"links\[1\]: the link from a to b is"),
        (TWO + "[default]\nmbps = 1\n", "default.rtt_ms is missing"),
    ],
)
def test_one_line_says_what_is_wrong(text, message):
    with pytest.raises(JobError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    for path, message in ((tmp_path / "none.toml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(JobError, match=message):
            load(path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="not UTF-8"):
        load(tmp_path / "x.toml")


keys = st.sampled_from(
    ["peers", "sites", "links", "default", "name", "gflops", "memory", "rtt_ms", "between"]
)
values = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(keys, values, max_size=5))
def test_any_tables_are_a_swarm_or_a_job_error(table):
    with contextlib.suppress(JobError):
        parse("".join(f"{key} = {written(value)}\n" for key, value in table.items()))


def written(value):
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{k} = {written(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(written, value)) + "]"
        case str():
            return f'"{value}"'
    return repr(value)


def test_the_example_is_a_swarm():
    swarm = load(Path(__file__).resolve().parents[3] / "examples" / "swarm.toml")
    assert all(swarm.pair(a.name, b.name).known for a, b in permutations(swarm.peers, 2))


FIFTY = '[[peers]]\nname = "home"\ncount = 50\ndevice = "rtx-3080"\n'


def test_peers_by_the_device_that_they_are_and_so_many_of_them():
    swarm = parse(FIFTY + "up_mbps = 100\n")
    assert [peer.name for peer in swarm.peers[:2]] == ["home-1", "home-2"] and len(swarm.peers) == 50
    device = swarm.network().devices[49]
    assert (device.flops_per_second, device.memory_bytes) == (0.5 * 29.8e12, 10 << 30)
    assert device.memory_bytes_per_second == 760e9 and device.up_bytes_per_second == 12.5e6
    assert swarm.network("bf16").devices[0].flops_per_second == 0.5 * 59.5e12
    assert swarm.price(swarm.by_name) == 50 * 699
    own = parse(FIFTY + 'efficiency = 0.3\nmemory = "8GiB"\nprice_usd = 300\nmemory_gb_per_second = 1\n')
    device = own.network().devices[0]
    assert device.flops_per_second == pytest.approx(0.3 * 29.8e12) and device.memory_bytes == 8 << 30
    assert device.memory_bytes_per_second == 1e9 and own.price(own.by_name) == 15_000


def test_what_is_said_in_gflops_is_that_in_every_precision_and_has_no_price():
    swarm = parse(TWO)
    assert swarm.network("bf16").devices == swarm.network().devices
    assert swarm.price(swarm.by_name) is None
    assert parse(TWO + "price_usd = 3\n").price(["b"]) == 3


def test_every_peer_with_a_line_of_its_own():
    swarm = parse(TWO + "up_mbps = 8\n").with_lines(80)
    assert {(d.up_bytes_per_second, d.down_bytes_per_second) for d in swarm.network().devices} == {(1e7, 1e7)}
    with pytest.raises(JobError, match="line-mbps must be above 0"):
        swarm.with_lines(0)
    with pytest.raises(JobError, match=r"line-mbps must be at least 1e-06, a bit a second, not"):
        swarm.with_lines(1e-320)
    with pytest.raises(JobError, match=r"peers\[1\].up_mbps must be at least 1e-06"):
        parse(TWO + "up_mbps = 1e-7\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FIFTY.replace("rtx-3080", "rtx-308"), "peers[0].device: 'rtx-308' is not in the table of devices (for example: "),
        (FIFTY + "gflops = 3\n", "peers[0].gflops (or mflops) must be set, or device: one of the three"),
        (FIFTY.replace("50", "0"), "peers[0].count must be from 1 to"),
        (FIFTY.replace("50", "10_000_000"), "peers[0].count must be from 1 to"),
        (FIFTY.replace("50", "900_000") + FIFTY.replace("home", "h").replace("50", "900_000"), "1800000 of them"),
        (FIFTY + "efficiency = 1.5\n", "peers[0].efficiency is of a device, above 0 and at most 1"),
        (TWO + "efficiency = 0.5\n", "peers[1].efficiency is of a device"),
        (FIFTY + "price_usd = 0\n", "peers[0].price_usd must be above 0"),
        (FIFTY + FIFTY, "peers[1].name: 'home-1' is taken"),
        (FIFTY.replace("rtx-3080", "epyc-7763"), "peers[0].memory must be set: epyc-7763 has none of its own"),
        ('[[peers]]\nname = "a"\ngflops = 1\n', "peers[0].memory is missing"),
        (FIFTY + 'site = "x"\n', "peers[0].site: no [[sites]] is called 'x'"),
    ],
)  # fmt: skip
def test_devices_and_counts_that_cannot_be(text, message):
    with pytest.raises(JobError) as caught:
        parse(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
