"""Planning a job captures the model that launching it would, without its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.captured_once import capture_once

from fusion.dag.ir import serialise
from fusion.dag.placement.machine import Machine
from fusion.dag.placement.network import Device, Link, Network
from fusion.dag.placement.place import place
from fusion.dag.placement.speeds import Speeds
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.job import spec
from fusion.runtime.peer.probes import TYPICAL
from fusion.runtime.placing import offline_graph
from fusion.runtime.placing.offline_graph import training_graph
from fusion.runtime.placing.offline_plan import plan_training
from fusion.runtime.placing.swarm_file import parse

JOB = """
name = "small"
[model]
kind = "gpt"
blocks = {blocks}
width = {width}
[data]
files = ["*.txt"]
held_out = 0.0
[train]
steps = 1
sequence = 32
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    return lambda **model: spec.parse(JOB.format(**model), tmp_path)


def test_the_graph_is_the_one_that_would_be_launched(job):
    spec = job(blocks=1, width=64)
    launched = sources.builtin(spec.model, spec.train.seed, byte_level=True, tokenizer=None)
    assert serialise.encode(training_graph(spec)) == serialise.encode(clean(launched.training))


def test_a_model_that_no_machine_here_could_hold_is_captured(job):
    graph = training_graph(job(blocks=1, width=65_536))  # 0.2 TB of weights
    assert sum(v.kind == "parameter" for v in graph.variables) == 16


SWARM = "".join(f'[[peers]]\nname = "p{i}"\ngflops = 1\nmemory = {{memory}}\n' for i in range(3))
LAN = "[default]\nmbps = 1000\nrtt_ms = 1\n"


@pytest.fixture
def captured_once(monkeypatch):
    capture_once(monkeypatch, offline_graph)


def placed(spec, memory):
    return plan_training(spec, parse(SWARM.format(memory=memory) + LAN), "equal-flops")


@pytest.mark.usefixtures("captured_once")
def test_as_deep_as_by_default_or_deeper_where_memory_permits(job):
    spec = job(blocks=3, width=64)
    roomy = placed(spec, 1 << 30)
    assert roomy.in_flight >= 1 + 2 * 2
    tight = placed(spec, max(stage.memory_bytes for stage in roomy.stages) - 1)
    assert tight.in_flight < roomy.in_flight
    assert all(stage.memory_bytes <= stage.lent_bytes for stage in tight.stages)


@pytest.mark.usefixtures("captured_once")
def test_gpipe_is_for_the_job_to_ask(job):
    spec = job(blocks=3, width=64)
    assert placed(spec, 1 << 30).schedule == "1f1b"
    spec = replace(spec, train=replace(spec.train, schedule="gpipe"))
    assert placed(spec, 1 << 30).schedule == "gpipe"


@pytest.mark.usefixtures("captured_once")
def test_what_is_sent_is_what_the_links_carry(job):
    found = placed(job(blocks=3, width=64), 1 << 30)
    dense = 8 * 4 * 32 * 64 * 4  # microbatches x (batch, sequence, width) float32
    assert [(link.activation_bytes + link.gradient_bytes) % dense for link in found.links] == [0] * 4
    assert all(link.mbps == 1000 and link.rtt_ms == pytest.approx(1) for link in found.links)
    assert found.lines == ()  # nobody's own line limits anything


def test_peers_of_one_machine_are_cut_apart_where_little_has_to_be_carried(job):
    """They went by compute alone, and cut inside of blocks, where five values cross, since that divides the work more evenly: what
    the cores carried then took longer than what the cut had won."""
    graph = training_graph(job(blocks=4, width=256))

    def sent(shared: Machine) -> tuple[int, ...]:
        devices = tuple(
            Device(peer=name, flops_per_second=1e9, memory_bytes=1 << 40, machine=shared, measured=Speeds.of([factor * part for part in TYPICAL.parts]))
            for name, factor in (("a", 1.0), ("b", 1.1))
        )  # fmt: skip
        links = {pair: Link(alpha_seconds=5e-4, bytes_per_second=250e6) for pair in (("a", "b"), ("b", "a"))}
        network = Network(devices=devices, links=links)
        return place(graph, network, {"batch": 2, "sequence": 32}, 8, stages=2).sent_bytes

    activation = 4 * 2 * 32 * 256
    assert sent(Machine(name="here", cores=2.0, message_seconds=1e-3, byte_seconds=2e-8)) == (activation,)
    assert sent(Machine())[0] > activation, "or this shows nothing"
