"""Training over the in-memory transport: several peers' contexts in one process, against plain autograd."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captured_once import capture_once
from support.training import (
    LANGUAGE,
    TINY,
    Job,
    Peer,
    assert_same,
    captured,
    config,
    ended,
    exported_weights,
    job,
    language_job,
    language_loss,
    record_of,
    record_of_peer,
    reference,
    run,
    swarm,
    tokens,
    until,
)
from torch import nn
from torch.nn import functional

from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import capture
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.errors import JobFailed
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.job.spec import GPTConfig, load
from fusion.runtime.launch.export import export
from fusion.runtime.launch.handed_over import Held
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.step.faults import PATIENCE
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import Digest, ProviderRecord


@pytest.mark.parametrize(
    ("stages", "tied"),
    [
        *((1, False), (3, False), (2, True), (4, True)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((2, False), (4, False), (1, True), (3, True))
        ),
    ],
)
def test_a_gpt_trains_as_in_one_process(tmp_path: Path, stages: int, tied: bool) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(replace(TINY, tied=tied))
        async with swarm(tmp_path, stages) as made:
            work = language_job(made.peers[0], module, config(), stages)
            progress = await run(made, work, range(stages))
            expected = reference(module, work, LANGUAGE, language_loss)
            weights = await exported_weights(made.peers[0], work, tmp_path / "out")
            assert_same(work, expected, made.peers[0], progress, weights)
            assert progress.state == "done" and progress.step == 6 and progress.snapshot_step == 6
            assert expected.losses[-1] < expected.losses[0]

    asyncio.run(main())


def test_a_job_ends_once_others_hold_what_its_launcher_takes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few its steps are: who exports it later asks for that. For what it began with nobody will ask any more."""

    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            work = language_job(made.peers[0], GPT(TINY), config(), 2, files={"config.json": b"{}"})
            manifest, slow, never = work.prepared.manifest, asyncio.Event(), asyncio.Event()
            [(_, copied)] = manifest.files
            owner = made.peers[1]
            fetch = owner.context.blobs.fetch

            async def fetched(digest: Digest, *args: Any, **named: Any) -> Path:
                if digest == copied:
                    await slow.wait()
                if digest == manifest.weights[1]:
                    await never.wait()
                return await fetch(digest, *args, **named)

            monkeypatch.setattr(owner.context.blobs, "fetch", fetched)
            running = asyncio.create_task(run(made, work, (1, 2)))

            def over() -> bool:
                found = owner.service.progress(work.prepared.job)
                return running.done() or (found is not None and found.step == 6)

            await until(over)
            await asyncio.sleep(0.2)
            slow.set()
            assert (await running).state == "done" and owner.context.blobs.has(copied)

    asyncio.run(main())


class Diamond(nn.Module):
    """Two branches of unlike depth that meet again, and the input once more at the end: skips over whole stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.deeper, self.last = (nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left = torch.tanh(self.left(x))
        right = self.deeper(torch.relu(self.right(x)))
        y: torch.Tensor = self.last(left * right + left) + x
        return y


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"),
    [pytest.param(2, 1, "1f1b", marks=pytest.mark.slow), (3, 8, "gpipe"), (4, 5, "1f1b")],
)
def test_a_diamond_with_skips_trains_as_in_one_process(
    tmp_path: Path, stages: int, microbatches: int, schedule: Any
) -> None:
    async def main() -> None:
        torch.manual_seed(2)
        module = Diamond()
        x = torch.randn(64, 6)
        save_file({"x": x, "targets": x.sin()}, tmp_path / "data")
        example = {"x": x[:4], "targets": x[:4]}
        train = config(
            data=DataConfig(kind="arrays", train=Digest("")), sequence=0, microbatches=microbatches, schedule=schedule,
            optimizer=OptimizerConfig(kind="sgd", learning_rate=0.1, clip_norm=0.5),
        )  # fmt: skip
        graph = clean(capture_module(module, example, functional.mse_loss))
        async with swarm(tmp_path, stages) as made:
            lead = made.peers[0]
            path = tmp_path / "data"
            work = job(lead, graph, variables_from_module(module), train, stages, path, path)
            progress = await run(made, work, range(stages))
            batches = Batches(work.prepared.manifest.train, ["x", "targets"], work.train, work.held_out)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses = []
            for step in range(6):
                parts = [batches.train(step, m) for m in range(microbatches)]
                loss = sum(functional.mse_loss(module(p["x"]), p["targets"]) for p in parts) / microbatches
                loss.backward()  # type: ignore[union-attr]
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            weights = await exported_weights(lead, work, tmp_path / "out")
            module_weights = module.state_dict()
            assert [loss for _, loss in lead.service.losses(work.prepared.job)] == pytest.approx(
                losses, rel=1e-5
            )
            for name, tensor in module_weights.items():
                assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
            assert progress.state == "done"

    asyncio.run(main())


def test_dropout_draws_the_same_masks_however_the_graph_is_cut(tmp_path: Path) -> None:
    async def losses(stages: int) -> list[tuple[int, float]]:
        torch.manual_seed(1)
        module = GPT(replace(TINY, dropout=0.3))
        async with swarm(tmp_path / str(stages), stages) as made:
            work = language_job(made.peers[0], module, config(), stages)
            await run(made, work, range(stages))
            return list(made.peers[0].service.losses(work.prepared.job))

    one, three = asyncio.run(losses(1)), asyncio.run(losses(3))
    assert [a for _, a in one] == pytest.approx([b for _, b in three], rel=1e-5)


def test_one_peer_may_run_several_stages(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path, 2) as made:
            work = language_job(made.peers[0], module, config(steps=2), 4)
            first, service, states = made.peers[0], made.peers[0].service, []
            whole = asyncio.create_task(run(made, work, [0, 1, 0, 1]))
            await until(lambda: 0 in first.tasks)
            first.tasks[0].add_done_callback(lambda _: states.append(service.progress(work.prepared.job)))
            progress = await whole
            # The lead's word counts as soon as it has ended, whatever another stage on its peer still believes.
            assert [p.state for p in states if p is not None] == ["done"]
            expected = reference(module, work, LANGUAGE, language_loss)
            assert [x for _, x in made.peers[0].service.losses(work.prepared.job)] == pytest.approx(
                expected.losses, rel=1e-5
            )
            assert set(progress.owners) == {p.context.peer_id for p in made.peers}
            assert len(progress.busy) == 4 and all(0 < b <= 1 for b in progress.busy)
            assert progress.sent_bytes > 0 and progress.received_bytes > 0

    asyncio.run(main())


def test_an_owner_of_a_term_that_is_over_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 3) as made:
            lead, old, intruder = made.peers
            work = language_job(lead, module, config(steps=10_000), 2)
            job_id = work.prepared.job
            await launch(lead.context, work.prepared)
            lead.context.leases.observe(job_id, 0, 4)
            await lead.host(work.prepared, 0)
            await old.host(work.prepared, 1)
            await until(lambda: (p := lead.service.progress(job_id)) is not None and p.step >= 2)

            async def say(peer: Peer, **changes: Any) -> str:
                hello = {"job": job_id, "source": 1, "target": 0, "term": 1, "target_term": 5, **changes}
                stream = await peer.context.transport.open(lead.context.peer_id, STAGE.name)
                await stream.send("hello", hello)
                reply = await stream.receive()
                if reply.kind == "welcome":
                    await stream.send("ready", {"term": hello["term"] - 1})
                    reply = await stream.receive()
                stream.abort()
                return f"{reply.kind}: {reply.header.get('message', reply.header.get('term'))}"

            assert "no claim of stage 1 at term 9 seen yet" in await say(intruder, term=9)
            assert "under term 5, not 4" in await say(old, target_term=4)
            assert "is here under term 5" in await say(old, target_term=6)
            assert "has nothing to say" in await say(old, source=7)
            incarnation = old.service._hosts[job_id, 1]._work.state.incarnation
            assert (await say(old, incarnation=incarnation + 1)).startswith(
                "stale"
            )  # it began anew under a term it had used
            assert "a frame of term 0 on a stream of term 1" in await say(old, incarnation=incarnation)
            # The stage goes to another peer, as its owner says itself: what the old owner says now is refused.
            claim = (await intruder.context.leases.claims(job_id, 1))[0]
            successor, holding = intruder.context.peer_id, Holding(claim.peer, claim.term)
            word = old.context.leases.voting.vote(job_id, 1, holding, successor)
            await intruder.context.directory.publish(replace(claim, peer=successor, term=2, proof=(word,)))
            assert await say(old, incarnation=incarnation) == "stale: 2"
            await until(lambda: old.context.leases.holds(job_id, 1) is None)

    asyncio.run(main())


def test_a_job_that_is_stopped_ends_with_a_snapshot_of_the_step_it_reached(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 2) as made:
            lead = made.peers[0]
            work = language_job(lead, module, config(steps=10_000, snapshot_every=1000), 2)
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            await made.peers[1].host(work.prepared, 1)
            seen: list[Progress] = []
            await until(lambda: lead.service.progress(work.prepared.job) is not None)
            async for progress in lead.service.watch(work.prepared.job):
                seen.append(progress)
                if progress.step == 5:
                    assert lead.service.stop(work.prepared.job)
            assert seen[-1].state == "stopped" and 5 <= seen[-1].step < 20
            assert seen[-1].snapshot_step == seen[-1].step
            await ended(made, lead)
            assert not lead.service.stop(work.prepared.job), "there is nothing to save any more"
            weights = await exported_weights(lead, work, tmp_path / "out")
            module.load_state_dict(weights, strict=True)

    asyncio.run(main())


def test_a_model_is_exported_long_after_the_job_when_nobody_announces_its_blobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 4) as made:
            *owners, watcher = made.peers
            lead = owners[0]
            work = language_job(lead, GPT(TINY), config(steps=2), 3)
            await launch(lead.context, work.prepared)
            for stage, owner in enumerate(owners):
                await owner.host(work.prepared, stage)
            await ended(made, lead)
            progress = lead.service.progress(work.prepared.job)
            assert progress is not None and progress.state == "done"
            await lead.context.directory.publish(record_of(lead, work, progress))
            for owner in owners:
                await owner.context.directory.publish(record_of_peer(owner))

            async def nobody(digest: Digest) -> tuple[ProviderRecord, ...]:
                return ()

            watcher.context.directory.providers = nobody  # type: ignore[method-assign]
            assert await export(watcher.context, work.prepared.job, tmp_path / "out") == 2

    asyncio.run(main())


def test_a_run_that_diverges_fails_with_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        train = config(steps=100, optimizer=OptimizerConfig(kind="sgd", learning_rate=1e6, clip_norm=None))
        async with swarm(tmp_path, 2) as made:
            lead = made.peers[0]
            work = language_job(lead, module, train, 2)
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            await lead.host(work.prepared, 1)  # with nobody else to give the stage to
            results = await asyncio.gather(
                *(t for peer in made.peers for t in peer.tasks.values()), return_exceptions=True
            )
            assert all(isinstance(r, JobFailed) and "not finite" in str(r) for r in results)
            progress = lead.service.progress(work.prepared.job)
            assert progress is not None and progress.state == "failed" and "not finite" in progress.error

    asyncio.run(main())


def test_a_target_that_the_model_does_not_have_fails_the_job_with_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        module, train = GPT(TINY), config(steps=100)
        text = bytearray(tokens())
        text[(len(text) - 1) // train.sequence * train.sequence] = 200  # a target alone, of the last sample
        async with swarm(tmp_path, 2) as made:
            lead, other = made.peers
            variables = variables_from_module(module)
            work = job(lead, captured(module), variables, train, 2, bytes(text), tokens())
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            for _ in range(PATIENCE):  # there is nobody else to give the stage to
                await other.host(work.prepared, 1)
                await asyncio.gather(other.tasks[1], return_exceptions=True)
                await other.context.leases.release(work.prepared.job, 1)
            with pytest.raises(JobFailed, match="at stage 1: IndexError: Target 200 is out of bounds"):
                await lead.tasks[0]

    asyncio.run(main())


def test_a_weights_blob_that_lacks_a_variable_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 1) as made:
            peer = made.peers[0]
            work = language_job(peer, module, config(), 1)
            path = tmp_path / "weights"
            values = load_file(peer.context.blobs.store.path(work.prepared.manifest.weights[0]))
            values.pop("tokens.weight")
            save_file(values, path)
            manifest = replace(work.prepared.manifest, weights=(peer.context.blobs.store.put(path),))
            with pytest.raises(ValueError, match=r"lacks tokens\.weight"):
                await peer.service.host(work.prepared.job, manifest, 0, 1)

    asyncio.run(main())


def test_the_launcher_may_leave_once_the_swarm_holds_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_once(monkeypatch, capture)
    (tmp_path / "text.txt").write_text("the quick brown fox " * 50)
    (tmp_path / "job.toml").write_text(
        'name = "fox"\n[model]\nkind = "gpt"\nblocks = 2\nwidth = 16\nheads = 2\n[data]\nfiles = ["text.txt"]\n'
        "[train]\nsteps = 6\nsequence = 8\nmicrobatches = 2\nsnapshot_every = 2\n[placement]\nstages = 2\n"
    )

    async def main() -> None:
        async with swarm(tmp_path, 4) as made:
            launcher, one, two, watcher = made.peers
            records = [record_of_peer(one), record_of_peer(two)]
            store = launcher.context.blobs.store
            prepared = await asyncio.to_thread(prepare_training, load(tmp_path / "job.toml"), records, store)
            await launch(launcher.context, prepared)
            assert await watcher.context.directory.job(prepared.job) is not None
            seen: list[Held] = []
            held = asyncio.ensure_future(wait_until_held(launcher.context, prepared, on_change=seen.append))
            await asyncio.sleep(0)
            owners = {peer.context.peer_id: peer for peer in (one, two)}
            for stage, owner in enumerate(prepared.manifest.proposed):
                await owners[owner].host(prepared, stage)
                for digest in (prepared.job,):
                    await owners[owner].context.blobs.fetch(Digest(digest))
            await held
            await made.kill(launcher)
            assert not seen[0].complete and seen[-1].complete
            lead = owners[prepared.manifest.proposed[0]]
            await asyncio.gather(*(t for peer in made.peers for t in peer.tasks.values()))
            progress = lead.service.progress(prepared.job)
            assert progress is not None and progress.state == "done"
            work = Job(prepared, tmp_path, tmp_path)
            await lead.context.directory.publish(record_of(lead, work, progress))
            assert await export(watcher.context, prepared.job, tmp_path / "out") == 6
            assert {p.name for p in (tmp_path / "out").iterdir()} == {
                "model.safetensors",
                "inference.graph",
                "fusion.json",
            }
            module = GPT(GPTConfig(blocks=2, width=16, heads=2, sequence=8))
            module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
            with pytest.raises(ValueError, match="not an empty directory"):
                await export(watcher.context, prepared.job, tmp_path / "out")
            assert not list(lead.context.home.glob("scratch/*"))

    asyncio.run(main())
