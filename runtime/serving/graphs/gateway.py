"""Any peer answers for any model that answers in one run: from named arrays to named arrays, by way of its stages.

/fusion/run/1   run {model, arrays, grants} + their bytes; the answer is `done` {arrays, route, seconds} + their bytes.
                Between peers: stage {job, stage, arrays, grants} + what the stage reads; the answer is `made` {arrays} + what it
                sends on and what it makes of the model's outputs, or `absent` where it does not run here
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.protocol import MAX_RUN_BYTES, RUN
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.serving.answers.catalog import Catalog, ServedModel
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.graphs.inputs import checked_inputs
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.swarm.authority.access import chain_of
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import (
    FrameError,
    NotAdmitted,
    PeerUnreachable,
    StreamBroken,
    StreamClosed,
    SwarmError,
)
from fusion.swarm.printable import error_line
from fusion.swarm.shares import Shares
from fusion.swarm.transport import Frame, PeerId, Stream, call

AT_ONCE = 4  # frames of MAX_RUN_BYTES that arrive here, runs of clients, and stages for others: of each
BUSY = "this peer has as many runs as it can: ask again later, or ask another peer"
FRAME_SECONDS = 60.0  # for whoever asks to send one
ARRIVING_SECONDS = 1.0  # after which one of them gives way to another
PATIENCE_SECONDS = 60.0  # for a stage to be taken over
RETRY_SECONDS = 0.5
MAX_HELD_BYTES = (
    4 * MAX_RUN_BYTES
)  # between two stages of a run: a stranger's model may have thousands of stages
RESULT = "result/"  # what a stage calls the outputs of the model


class GraphGateway:
    def __init__(self, context: Context, stages: GraphStages, graphs: StageGraphs, catalog: Catalog) -> None:
        self._context = context
        self._stages = stages
        self._graphs = graphs
        self._catalog = catalog
        clock = context.clock.monotonic
        self._arriving: Shares[Stream] = Shares(clock, AT_ONCE, ARRIVING_SECONDS)
        # A run waits for stages, and these for nobody: they have places of their own.
        self._places: dict[str, Shares[Stream]] = {
            kind: Shares(clock, AT_ONCE, PATIENCE_SECONDS) for kind in ("run", "stage")
        }

    async def start(self) -> None:
        await self._context.transport.serve(RUN.name, self._attend)

    # --- whoever asks

    async def _attend(self, stream: Stream) -> None:
        frame = await self._frame(stream)
        places = self._places.get(frame.kind)
        if places is None:
            raise FrameError(f"clients send run, peers stage, not {frame.kind!r:.40}")
        if not _has_place(places, stream):
            await stream.send(*(("error", {"message": BUSY}) if frame.kind == "run" else ("busy", {})))
            return
        places.take(stream, stream.remote)
        answering = asyncio.create_task(self._answer(stream, frame))
        gone = asyncio.create_task(stream.receive())  # also where it gives way to another
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            gone.cancel()
            outcome, _ = await asyncio.gather(answering, gone, return_exceptions=True)
            places.release(stream)
        if isinstance(outcome, Exception):
            raise outcome
        await stream.aclose()

    async def _answer(self, stream: Stream, frame: Frame) -> None:
        try:
            await (self._run if frame.kind == "run" else self._run_stage)(stream, frame)
        except NotAdmitted as error:
            said = {"message": str(error), "closed": error.job, "ask": list(error.ask)}
            await stream.send("error", said)
        except (PeerUnreachable, StreamBroken, StreamClosed, FrameError):
            raise
        except (JobError, JobFailed, SwarmError) as error:
            await stream.send("error", {"message": error_line(error)})

    async def _frame(self, stream: Stream) -> Frame:
        """The first frame. One of more than UNASKED_BYTES is read only while few such arrive."""
        if _has_place(self._arriving, stream):
            self._arriving.take(stream, stream.remote)
            stream.allow(MAX_RUN_BYTES)
        try:
            async with asyncio.timeout(FRAME_SECONDS):
                return await stream.receive()
        finally:
            self._arriving.release(stream)

    async def _run(self, stream: Stream, frame: Frame) -> None:
        began = self._context.clock.monotonic()
        name = frame.header.get("model", "")
        if not isinstance(name, str):
            raise FrameError("model: a text")
        given = read_arrays(frame.header, frame.payload)
        made, route = await self.run(name, given, stream.remote, chain_of(frame.header.get("grants")))
        header = {**described(made), "route": route, "seconds": self._context.clock.monotonic() - began}
        await stream.send("done", header, [a.data for a in made])

    async def _run_stage(self, stream: Stream, frame: Frame) -> None:
        job, stage = frame.header.get("job"), frame.header.get("stage")
        if not isinstance(job, str) or type(stage) is not int:
            raise FrameError("stage: a job and a number")
        manifest = self._stages.held(JobId(job), stage)
        if manifest is None:
            await stream.send("absent")
            return
        grants = chain_of(frame.header.get("grants"))
        refused = self._context.access.refusal(JobId(job), stream.remote, "ask", None, grants)
        if refused is not None:
            raise NotAdmitted(f"model: {manifest.name} is not for everybody: {refused}", job)
        made = await self._stages.compute(JobId(job), stage, read_arrays(frame.header, frame.payload))
        await stream.send("made", described(made), [a.data for a in made])

    # --- the gateway

    async def run(
        self, name: str, given: list[Array], client: PeerId, grants: tuple[bytes, ...] = ()
    ) -> tuple[list[Array], list[PeerId]]:
        """The outputs of the model served under `name`, and who made them. Raises JobError (the request), NotAdmitted,
        JobFailed (a stage), SwarmError."""
        model = await self._catalog.find(name)
        if not model.serve.outputs:
            raise JobError(f"model: {model.manifest.name} generates text; ask it with: fusion-peer generate")
        if client != self._context.peer_id or grants:
            refused = self._context.access.refusal(model.job, client, "ask", None, grants)
            if refused is not None:
                raise NotAdmitted(f"model: {model.manifest.name} is not for everybody: {refused}", model.job)
        await self._catalog.check_admitted(model.job, model.manifest)
        stages, _ = await self._graphs.of(model.job, model.manifest)
        values = checked_inputs(stages, {a.name: a for a in given}, model.serve.sizes)
        results = [f"{RESULT}{i}" for i in range(len(model.serve.outputs))]
        last = {i.name: stage.index for stage in stages for i in stage.graph.inputs}  # that reads it
        route: list[PeerId] = []
        for stage in stages:
            if not stage.graph.nodes:
                continue
            try:
                read = [values[i.name] for i in stage.graph.inputs]
            except KeyError as missing:
                raise JobFailed(f"no stage of {model.manifest.name} made {missing}") from None
            _check_size(read, f"what stage {stage.index} reads")
            made, peer = await self._asked(model, stage, read)
            own = {edge.name for edge in stage.sends}.union(results[i] for i in stage.results)
            values.update((a.name, a) for a in made if a.name in own)
            values = {name: a for name, a in values.items() if name in results or last[name] > stage.index}
            if sum(len(a.data) for a in values.values()) > MAX_HELD_BYTES:
                raise JobFailed(
                    f"{model.manifest.name} makes more on the way than a gateway keeps: {MAX_HELD_BYTES >> 20} MiB"
                )
            route.append(peer)
        try:
            outputs = [values[name] for name in results]
        except KeyError as missing:
            raise JobFailed(f"no stage of {model.manifest.name} made {missing}") from None
        _check_size(outputs, "what the model makes")
        return [
            Array(called, a.dtype, a.shape, a.data)
            for called, a in zip(model.serve.outputs, outputs, strict=True)
        ], route

    async def _asked(
        self, model: ServedModel, stage: Stage, given: list[Array]
    ) -> tuple[list[Array], PeerId]:
        """What the stage makes of these, by its owner; where that vanishes, by the next one."""
        job, index = model.job, stage.index
        header = {
            "job": job, "stage": index, "grants": list(self._context.access.chain(job)), **described(given)
        }  # fmt: skip
        trouble = f"nobody has stage {index} of {model.manifest.name}"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    owner = await self._context.leases.owner(job, index)
                    if self._stages.held(job, index) is not None:
                        return await self._stages.compute(job, index, given), self._context.peer_id
                    if owner is not None and owner.peer != self._context.peer_id:
                        try:
                            answer = await call(
                                self._context.transport, owner.peer, RUN.name, "stage", header, [a.data for a in given]
                            )  # fmt: skip
                            if answer.kind == "made":
                                return read_arrays(answer.header, answer.payload), owner.peer
                            trouble = f"stage {index} of {model.manifest.name} is {answer.kind} at its owner"
                        except (PeerUnreachable, StreamBroken, StreamClosed) as error:
                            trouble = error_line(error)
                            self._catalog.forget_route(job)
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            raise JobFailed(f"no answer in {PATIENCE_SECONDS:.0f} s: {trouble}") from None


def _check_size(arrays: Sequence[Array], what: str) -> None:
    """Of several stages, each of which sends no more than one frame has room for. Raises JobError."""
    size = sum(len(a.data) for a in arrays)
    if size > MAX_RUN_BYTES:
        raise JobError(
            f"input: {what} of so many samples has {size} bytes; at most {MAX_RUN_BYTES}: fewer at once (--batch)"
        )


def _has_place(places: Shares[Stream], stream: Stream) -> bool:
    """Whether there is room for it, be it that of somebody who has more."""
    other = None if places.room() else places.yields(stream.remote, 1)
    if other is not None:
        places.release(other)
        other.abort()
    return places.room()
