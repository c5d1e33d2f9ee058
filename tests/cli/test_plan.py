"""`fusion-peer plan`: a placement in words before anything runs, and one line for whatever is wrong with its files."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.captured_once import capture_once

from fusion.cli import main
from fusion.cli.plans.training_plan import show, summary
from fusion.cli.terminal.output import Output
from fusion.runtime.placing import offline_graph
from fusion.runtime.placing.plan import Plan, PlannedLine, PlannedLink, PlannedStage

NETWORKS = Path(__file__).resolve().parents[1] / "box" / "networks"
JOB = """
name = "small"
[model]
kind = "gpt"
blocks = 3
width = 64
[data]
files = ["text.txt"]
held_out = 0.0
[train]
steps = 1
sequence = 32
microbatches = 4
"""
SWARM = """
[[peers]]
name = "near"
gflops = 2
memory = "1GiB"
[[peers]]
name = "far"
gflops = 2
memory = "1GiB"
up_mbps = 1
"""


@pytest.fixture(autouse=True)
def _each_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch, offline_graph)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def plan(job: Path, swarm: Path, *words: str) -> int:
    return main.main(["plan", str(job), "--swarm", str(swarm), *words])


@pytest.mark.parametrize("scheduler", ["op-fence", "equal-ops", "equal-flops", "exact"])
def test_json_says_who_computes_what_and_who_is_left_out(job, capsys, scheduler):
    assert plan(job, NETWORKS / "a.toml", "--json", "--scheduler", scheduler) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    stages = found["stages"]
    assert found["event"] == "plan"
    assert {s["peer"] for s in stages} | set(found["left_out"]) == {
        f"{side}-{i}" for side in ("west", "east") for i in (1, 2, 3)
    }
    assert stages[0]["first_node"] == 0
    assert all(a["last_node"] + 1 == b["first_node"] for a, b in itertools.pairwise(stages))
    assert sum(s["flops_share"] for s in stages) == pytest.approx(1)
    assert all(s["memory_bytes"] <= s["lent_bytes"] and 0 < s["busy"] <= 1 for s in stages)
    assert all(
        link["known"] and link["seconds"] > 0 and link["activation_bytes"] + link["gradient_bytes"] > 0
        for link in found["links"]
    )
    assert 0 < found["bound_seconds"] <= min(found["predicted_seconds"], found["simulated_seconds"])  # fmt: skip


def test_people_get_tables_and_the_bottleneck(job, capsys, tmp_path):
    assert plan(job, NETWORKS / "b.toml", "--scheduler", "equal-ops") == 0
    text = capsys.readouterr().out
    for word in (
        "Stages",
        "Links",
        "home-6",
        "bottleneck: ",
        "a step: ",
        "predicted",
        "simulated",
        "shared lines",
    ):
        assert word in text  # fmt: skip
    (tmp_path / "swarm.toml").write_text(SWARM)
    assert plan(job, tmp_path / "swarm.toml", "--scheduler", "equal-ops") == 0
    assert "(a guess)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"swarm": SWARM.replace("gflops = 2", "gflops = -2", 1)}, "swarm.toml: peers[0].gflops must be above 0"),
        ({"swarm": SWARM + "speed = 3\n"}, "swarm.toml: peers[1].speed is not known here (known: "),
        ({"swarm": SWARM + "[["}, "swarm.toml: not TOML"),
        ({"swarm": None}, "swarm.toml: No such file"),
        ({"swarm": SWARM.replace("1GiB", "1KiB")}, "does not fit"),
        ({"job": JOB + "depth = 3\n"}, "job.toml: train.depth is not known here"),
        ({"job": JOB.replace("blocks = 3", "blocks = -3")}, "job.toml: model.blocks"),
        ({"job": JOB + "["}, "job.toml: not TOML"),
        ({"job": "a = " + "[" * 5000}, "job.toml: not a job: tables or lists nested too deep"),
        ({"job": None}, "job.toml: No such file"),
        ({"job": JOB + "[placement]\nstages = 9\n"}, "9 stages were asked for"),
        ({"job": JOB + '[placement]\npeers = ["who"]\n'}, "placement.peers: the swarm file has no peer called 'who'"),
    ],
)  # fmt: skip
def test_one_line_and_exit_code_2(job, capsys, tmp_path, changed, said):
    files = {"job": JOB, "swarm": SWARM} | changed
    for name, text in files.items():
        path = tmp_path / f"{name}.toml"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    assert plan(job, tmp_path / "swarm.toml") == 2
    captured = capsys.readouterr()
    *before, line = captured.err.splitlines()
    assert line.startswith("fusion-peer: ") and said in line
    assert captured.out == "" and all(status.startswith("placing small") for status in before)


@pytest.mark.parametrize(
    "words", [["plan"], ["plan", "job.toml"], ["plan", "j", "--swarm", "s", "--scheduler", "luck"]]
)
def test_a_wrong_command_line(words, capsys):
    assert main.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


ONE = PlannedStage(
    stage=0,
    peer="12D3KooWa",
    first_node=0,
    last_node=9,
    flops_share=1.0,
    memory_bytes=1 << 20,
    lent_bytes=1 << 30,
    seconds=1.5,
    busy=0.5,
)
LINK = PlannedLink(
    sender="12D3KooWa",
    receiver="12D3KooWb",
    activation_bytes=1e6,
    gradient_bytes=0,
    codecs=("none",),
    mbps=float("inf"),
    rtt_ms=3.0,
    seconds=0.1,
    known=True,
)
PLAN = Plan(
    stages=(ONE,),
    links=(LINK,),
    lines=(PlannedLine(peer="12D3KooWa", up_seconds=0.25, down_seconds=0.0),),
    left_out=tuple(f"p{i}" for i in range(12)),
    microbatches=1,
    schedule="1f1b",
    in_flight=1,
    predicted_seconds=3.0,
    simulated_seconds=2.5,
    bound_seconds=1.5,
    bottleneck="uplink of 12D3KooWa",
)


def test_peers_are_called_by_the_names_that_people_know():
    out = Output(stdout=io.StringIO(), stderr=io.StringIO())
    show(PLAN, out, {"12D3KooWa": "quiet-otter"})
    assert isinstance(out.stdout, io.StringIO)
    text = out.stdout.getvalue()
    assert "12D3KooWa" not in text and "bottleneck: uplink of quiet-otter" in text
    assert "quiet-otter (250 ms up, 0 ms down)" in text
    assert "p9 and 2 more" in text and "1 microbatch," in text and "no limit" in text


def test_only_what_there_is_to_say_is_said():
    alone = replace(PLAN, links=(), lines=(), left_out=())
    assert len(summary(alone, {})) == 3
    assert "a guess" in summary(replace(PLAN, links=(replace(LINK, known=False),)), {})[-1]


def test_what_other_lines_and_devices_would_change(job, capsys, tmp_path):
    swarm = tmp_path / "swarm.toml"
    swarm.write_text('[[peers]]\nname = "home"\ncount = 2\ndevice = "rtx-3080"\n[default]\nrtt_ms = 1\n')
    job.write_text(JOB + "[placement]\nstages = 2\n")
    found = []
    for mbps in ("1", "1000"):
        assert plan(job, swarm, "--json", "--line-mbps", mbps) == 0
        found.append(json.loads(capsys.readouterr().out))
    slow, fast = found
    assert slow["simulated_seconds"] > 10 * fast["simulated_seconds"] and fast["price_usd"] == 1398
    assert {link["mbps"] for link in slow["links"]} == {1.0} and fast["samples"] == 16
    assert plan(job, swarm, "--line-mbps", "1") == 0
    assert "sequences/s; of peers for $1,398, " in capsys.readouterr().out
    assert plan(job, swarm, "--line-mbps", "-1") == 2
    assert capsys.readouterr().err == "fusion-peer: --line-mbps must be above 0 and finite, not -1\n"


def test_json_has_no_infinity():
    found = PLAN.to_json()
    assert found["links"][0]["mbps"] is None and found["links"][0]["from"] == "12D3KooWa"
    json.dumps(found, allow_nan=False)


COMPRESSED = """
[compression]
kind = "adaptive"
ratio = 20
families = ["bf16", "int8", "topk"]
"""


def test_the_codec_of_every_link_is_shown_and_the_step_is_the_faster_for_it(job, capsys, tmp_path):
    swarm = tmp_path / "swarm.toml"
    swarm.write_text(SWARM + "[default]\nmbps = 0.5\nrtt_ms = 20\n")
    found = []
    for more in ("", "[placement]\nstages = 2\n", COMPRESSED + "[placement]\nstages = 2\n"):
        job.write_text(JOB + more)
        assert plan(job, swarm, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    best, dense, compressed = found
    assert dense["compression"]["kind"] == "none" and compressed["compression"]["kind"] == "adaptive"
    assert {codec for link in dense["links"] for codec in link["codecs"]} == {"none"}
    assert all(codec.startswith("topk:") for link in compressed["links"] for codec in link["codecs"])
    for one, other in zip(dense["links"], compressed["links"], strict=True):
        assert 0 < other["seconds"] < one["seconds"] / 10
    assert compressed["predicted_seconds"] < dense["predicted_seconds"]
    assert best["predicted_seconds"] <= dense["predicted_seconds"]
    job.write_text(JOB + COMPRESSED + "[placement]\nstages = 2\n")
    assert plan(job, swarm) == 0
    text = capsys.readouterr().out
    assert "compression: topk:" in text and "(allowed: bf16, int8, topk, at most 20 times)" in text
    assert plan(job, swarm, "--json") == 0
    assert json.loads(capsys.readouterr().out) == compressed  # whatever this machine is doing


def test_a_uniform_codec_is_on_every_link_and_a_fast_link_is_left_alone(job, capsys, tmp_path):
    swarm = tmp_path / "swarm.toml"
    swarm.write_text(SWARM.replace("up_mbps = 1\n", "") + "[default]\nmbps = 40_000\nrtt_ms = 1\n")
    job.write_text(JOB + '[placement]\nstages = 2\n[compression]\nkind = "uniform"\ncodec = "bf16"\n')
    assert plan(job, swarm) == 0
    assert "compression: bf16, on every link" in capsys.readouterr().out
    job.write_text(JOB + COMPRESSED + "[placement]\nstages = 2\n")
    assert plan(job, swarm, "--json") == 0
    links = json.loads(capsys.readouterr().out)["links"]
    assert {codec for link in links for codec in link["codecs"]} == {"none"}
