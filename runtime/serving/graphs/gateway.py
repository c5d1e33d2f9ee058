"""Any peer is a gateway for models that run once for each request: from named arrays to named arrays, through their stages.

/fusion/run/1   run {model, arrays, grants} + their bytes; the answer is `done` {arrays, route, seconds} + their bytes.
                Between peers: stage {job, stage, arrays, grants} + what the stage reads; the answer is `made` {arrays} + what it
                sends on and what it makes of the model's outputs, or `absent` where it does not run here, or `busy` where others' do.
                `busy` also says that a large frame is not read, of which as many arrive as may
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.protocol import MAX_RUN_BYTES, RUN
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.serving.answers.catalog import Catalog, ServedModel
from fusion.runtime.serving.answers.clients import Arrivals, answer_until_disconnect, send, send_error
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.graphs.inputs import checked_inputs, most_samples
from fusion.runtime.serving.graphs.owners import StageOwners
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
from fusion.swarm.transport import Frame, PeerId, Stream
from fusion.swarm.turns import Turns

AT_ONCE = 4  # of each: large frames that arrive, runs of clients, and stages run for other gateways
BUSY = "this peer has as many runs as it can: ask again later, or ask another peer"
# Of intermediate values of a run: a stranger's model may have thousands of stages
MAX_HELD_BYTES = 4 * MAX_RUN_BYTES
RESULT = "result/"  # prefix of the names of the model's outputs at a stage


class GraphGateway:
    def __init__(self, context: Context, stages: GraphStages, graphs: StageGraphs, catalog: Catalog) -> None:
        self._context = context
        self._stages = stages
        self._graphs = graphs
        self._catalog = catalog
        self._owners = StageOwners(context, stages, catalog.routes.forget)
        clock = context.clock.monotonic
        self._arriving = Arrivals(clock, AT_ONCE)
        # Runs wait for stages, so both have limits of their own, else they could deadlock. A running one is never idle.
        self._turns: dict[str, Turns] = {kind: Turns(clock, AT_ONCE, math.inf) for kind in ("run", "stage")}

    async def start(self) -> None:
        await self._context.transport.serve(RUN.name, self._attend)

    # --- clients and other gateways

    async def _attend(self, stream: Stream) -> None:
        frame = await self._arriving.first(stream)
        if frame is None:
            await send(stream, "busy", {})
            return
        turns = self._turns.get(frame.kind)
        if turns is None:
            raise FrameError(f"clients send run, peers stage, not {frame.kind!r:.40}")
        turn = turns.turn(stream.remote)
        if turn is None:
            await _refuse(stream, frame.kind)
            return
        await answer_until_disconnect(
            stream,
            turn,
            self._answer(stream, frame),
            lambda completed: turns.release(turn, completed=completed),
        )
        if turn.done():
            await _refuse(stream, frame.kind)

    async def _answer(self, stream: Stream, frame: Frame) -> bool:
        """Whether the reply was sent to its end."""
        try:
            return await (self._run if frame.kind == "run" else self._run_stage)(stream, frame)
        except NotAdmitted as error:
            await send_error(stream, str(error), closed=error.job, ask=list(error.ask))
        except (PeerUnreachable, StreamBroken, StreamClosed, FrameError):
            raise
        except (JobError, JobFailed, SwarmError) as error:
            await send_error(stream, error)
        return False

    async def _run(self, stream: Stream, frame: Frame) -> bool:
        began = self._context.clock.monotonic()
        name = frame.header.get("model", "")
        if not isinstance(name, str):
            raise FrameError("model: a text")
        inputs = read_arrays(frame.header, frame.payload)
        outputs, route = await self.run(name, inputs, stream.remote, chain_of(frame.header.get("grants")))
        header = {**described(outputs), "route": route, "seconds": self._context.clock.monotonic() - began}
        await send(stream, "done", header, [a.data for a in outputs])
        return True

    async def _run_stage(self, stream: Stream, frame: Frame) -> bool:
        job, stage = frame.header.get("job"), frame.header.get("stage")
        if not isinstance(job, str) or type(stage) is not int:
            raise FrameError("stage: a job and a number")
        manifest = self._stages.held(JobId(job), stage)
        if manifest is None:
            await send(stream, "absent", {})
            return False
        grants = chain_of(frame.header.get("grants"))
        refused = self._context.access.refusal(JobId(job), stream.remote, "ask", None, grants)
        if refused is not None:
            raise NotAdmitted(f"model: {manifest.name} is not for everybody: {refused}", job)
        outputs = await self._stages.compute(JobId(job), stage, read_arrays(frame.header, frame.payload))
        await send(stream, "made", described(outputs), [a.data for a in outputs])
        return True

    # --- the gateway

    async def run(
        self, name: str, inputs: list[Array], client: PeerId, grants: tuple[bytes, ...] = ()
    ) -> tuple[list[Array], list[PeerId]]:
        """The outputs of the model served under `name`, and the peers of its stages. Raises JobError (the request), NotAdmitted, JobFailed
        (a stage), SwarmError."""
        model = await self._catalog.find(name)
        if not model.serve.outputs:
            raise JobError(f"model: {model.manifest.name} generates text; ask it with: fusion-peer generate")
        await self._catalog.check_client(model, client, grants)
        stages, _ = await self._graphs.of(model.job, model.manifest)
        values = checked_inputs(stages, {a.name: a for a in inputs}, model.serve.sizes)
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
            stage_outputs, peer = await self._owners.run(model, stage, read)
            own = {edge.name for edge in stage.sends}.union(results[i] for i in stage.results)
            values.update((a.name, a) for a in stage_outputs if a.name in own)
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

    async def samples_at_once(self, model: ServedModel, sizes: Mapping[str, int]) -> int:
        """The largest batch of a run whose other dimensions are `sizes`, such that inputs and outputs of each stage fit into a frame. At
        least 1. Raises as `run`."""
        stages, _ = await self._graphs.of(model.job, model.manifest)
        return most_samples(stages, {**model.serve.sizes, **sizes}, MAX_RUN_BYTES)


async def _refuse(stream: Stream, kind: str) -> None:
    """Refuse a request that was not admitted, or was preempted."""
    with suppress(SwarmError):
        await (send_error(stream, BUSY) if kind == "run" else send(stream, "busy", {}))


def _check_size(arrays: Sequence[Array], what: str) -> None:
    """JobError where values of several stages do not fit into one frame together."""
    size = sum(len(a.data) for a in arrays)
    if size > MAX_RUN_BYTES:
        raise JobError(
            f"input: {what} of so many samples has {size} bytes; at most {MAX_RUN_BYTES}: fewer at once (--batch)"
        )
