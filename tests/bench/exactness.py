"""Checks whether two checkouts compute the same bits: fixed jobs, run by real peers of this machine.

    python tests/bench/exactness.py --json before.json                     in one checkout
    python tests/bench/exactness.py --json after.json --against before.json    in the other one

parity       the jobs of `tests/e2e/test_parity.py`: one step on 1 to 4 peers, and fifty on 3
demo         the demo's job, 200 steps on 3 peers, with less in a step (--full: as large as the demo's)
compressed   the same with `int8`, then `topk:0.25`, and error feedback on every edge, 40 steps each
answers      from what `demo` trained, served by 3 peers: greedy, and drawn with a seed

Of a job: its plan (graph, cuts, weights: SHA-256), the loss of every step as a hexadecimal float, the SHA-256 of each
stage's last state, optimizer included, and of the exported weights. Peers have one thread each; cuts and owners are
given, so nothing depends on what a peer measures. Equal figures are to be expected on one machine with one PyTorch.

Exit 0: done, and equal where --against is given. 1: different; each difference is a line.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is loaded
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.jobs import run_to_end
from support.parity import CASES, fifty_steps, make, one_step

from fusion.cli.demo import job_text
from fusion.cli.local.chaos_job import invented
from fusion.cli.local.fleet import open_fleet
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job import spec
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.launch.export import export
from fusion.runtime.launch.launch import launch, wait_until_held
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.launch.prepare_serving import prepare_serving
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

PEERS, STAGES = 4, 3
STEPS, COMPRESSED_STEPS = 200, 40
CODECS = ("int8", "topk:0.25")
WIDTH, HEADS, SEQUENCE, MICROBATCH_SIZE = 96, 4, 64, 2  # instead of the demo's
PROMPT, TOKENS = "def ", 48
SAMPLINGS = {"greedy": Sampling(), "drawn": Sampling(temperature=0.7, top_k=40, top_p=0.95, seed=1)}
PARTS = ("parity", "demo", "compressed", "answers")

Figures = dict[str, Any]


class Bench:
    """A client of a running swarm whose `peers` take the stages in order. `seconds`: the timeout of a job."""

    def __init__(
        self, context: Context, peers: Sequence[PeerId], folder: Path, seconds: float, full: bool
    ) -> None:
        self.context = context
        self.peers = peers
        self.folder = folder
        self._seconds = seconds
        self._full = full

    @property
    def _store(self) -> BlobStore:
        return self.context.blobs.store

    async def parity(self) -> Figures:
        found = {}
        cases = {name: make(name) for name in dict.fromkeys(name for name, _, _ in CASES)}
        for name, stages, microbatches in CASES:
            prepared = one_step(cases[name], name, stages, microbatches, self._store, self.peers)
            title = f"parity: {name}, {stages} stages, {microbatches} microbatches"
            found[title] = await self._trained(title, prepared)
        _, prepared = fifty_steps(self._store, self.peers[:STAGES])
        return {**found, "parity: fifty steps": await self._trained("parity: fifty steps", prepared)}

    async def demo(self) -> Figures:
        return {"demo": await self._trained("demo", self._gpt("demo", STEPS))}

    async def compressed(self) -> Figures:
        found = {}
        for codec in CODECS:
            how = CompressionConfig(kind="uniform", codec=codec, error_feedback=True, live=False)
            title = f"compressed-{codec}"
            prepared = self._gpt(title, COMPRESSED_STEPS, compression=how)
            found[title] = await self._trained(title, prepared)
        return found

    async def answers(self) -> Figures:
        """The answers of the model that `demo` exported."""
        peers = [invented(i) for i in range(STAGES)]
        folder = self.folder / "demo"
        prepared = await asyncio.to_thread(
            prepare_serving, ServingSpec(path=folder, name="exact", stages=STAGES), peers, self._store
        )
        prepared = self._placed(prepared)
        await launch(self.context, prepared)
        async with asyncio.timeout(self._seconds):
            await wait_until_held(self.context, prepared)
            found = {}
            for name, sampling in SAMPLINGS.items():
                request = GenerateRequest(
                    model="exact", prompt=PROMPT, max_tokens=TOKENS, sampling=sampling, seeded=True
                )
                answer = await complete(self.context.transport, self.peers[-1], request)
                found[name] = list(answer.tokens)
                say(f"answers: {name}: {PROMPT}{answer.text!r}")
        return {"answers": {"plan": _plan(prepared), **found}}

    def _gpt(self, name: str, steps: int, **changes: Any) -> Prepared:
        job = replace(spec.parse(job_text(["all"] * STAGES, steps), Path()), name=name, **changes)
        job = replace(job, placement=spec.PlacementSpec(stages=STAGES))
        if not self._full:
            assert isinstance(job.model, spec.GPTConfig)
            job = replace(
                job,
                model=replace(job.model, width=WIDTH, heads=HEADS, sequence=SEQUENCE),
                train=replace(job.train, sequence=SEQUENCE, microbatch_size=MICROBATCH_SIZE),
            )
        # The peers that it is placed on are all alike: those that run measure another speed at every start.
        return self._placed(prepare_training(job, [invented(i) for i in range(STAGES)], self._store))

    def _placed(self, prepared: Prepared) -> Prepared:
        manifest = replace(prepared.manifest, proposed=tuple(self.peers[: prepared.manifest.stages]))
        job = JobId(self._store.put(manifests.encode(manifest)))
        return replace(prepared, job=job, manifest=manifest, blobs=(Digest(job), *prepared.blobs[1:]))

    async def _trained(self, title: str, prepared: Prepared) -> Figures:
        losses: dict[int, float] = {}

        def learn(progress: Progress) -> None:
            losses.update(progress.recent)

        progress = await run_to_end(self.context, prepared, on_progress=learn, seconds=self._seconds)
        assert len(losses) == progress.step == progress.steps, (len(losses), progress)
        say(f"{title}: {progress.step} steps, last loss {losses[max(losses)]:.6f}")
        folder = self.folder / title.replace(" ", "-")
        await export(self.context, prepared.job, folder)
        held_out = progress.validation_loss
        return {
            "plan": _plan(prepared),
            "losses": [losses[step].hex() for step in sorted(losses)],
            "held_out": None if held_out is None else held_out.hex(),
            "ledger": progress.ledger,
            "states": await self._states(prepared),
            "weights": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        }

    async def _states(self, prepared: Prepared) -> list[str]:
        record = await self.context.directory.job(prepared.job)
        assert record is not None and record.snapshot is not None
        hints = [peer for peer in (record.lead, record.author) if peer is not None]
        data = await self.context.blobs.read(record.snapshot, snapshot.MAX_INDEX_BYTES, hints)
        return list(snapshot.decode_index(data, prepared.job, prepared.manifest.stages).shards)


def _plan(prepared: Prepared) -> Figures:
    manifest = prepared.manifest
    return {"graph": manifest.graph, "cuts": list(manifest.cuts), "weights": list(manifest.weights)}


async def measure(parts: Sequence[str], seconds: float, full: bool) -> Figures:
    found: Figures = {"torch": torch.__version__, "full": full}
    async with open_fleet("fusion-exactness-") as fleet:
        first = await fleet.start_peer("peer-1")
        others = [
            await fleet.start_peer(f"peer-{i}", bootstrap=(first.address,)) for i in range(2, PEERS + 1)
        ]
        peers = [PeerId(peer.peer_id) for peer in (first, *others)]
        async with open_client(ClientConfig(home=fleet.root / "client", peer=first.address)) as context:
            bench = Bench(context, peers, fleet.root / "exported", seconds, full)
            runs: dict[str, Callable[[], Any]] = {part: getattr(bench, part) for part in PARTS}
            for part in parts:
                found |= await runs[part]()
    return found


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """A line for each difference of two reports."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{where} / {key}" if where else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        unlike = [i for i, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
        if unlike:
            at = unlike[0]
            yield f"{where}: {len(unlike)} of {len(before)}, first number {at}: {before[at]} -> {after[at]}"
    elif before != after:
        yield f"{where}: {before} -> {after}"


def digest(found: Figures) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/bench/exactness.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default=",".join(PARTS), help="a comma between parts; answers need demo")
    parser.add_argument("--full", action="store_true", help="a step as large as the demo's")
    parser.add_argument("--seconds", type=float, default=1200.0, help="for a job, at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="figures of another checkout")
    given = parser.parse_args()
    parts = given.only.split(",")
    if set(parts) - set(PARTS) or ("answers" in parts and "demo" not in parts):
        parser.error(f"--only: of {', '.join(PARTS)}; answers need demo")
    torch.set_num_threads(1)
    found = asyncio.run(measure([part for part in PARTS if part in parts], given.seconds, given.full))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    said = {"jobs": len(found) - 2, "sha256": digest(found)}
    unlike = list(differences(json.loads(given.against.read_text()), found)) if given.against else []
    for line in unlike:
        say(f"different: {line}")
    print(json.dumps({**said, **({"equal": not unlike} if given.against else {})}))
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
