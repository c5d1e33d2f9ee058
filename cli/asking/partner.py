"""The model of a chat: renders the messages to a prompt and streams the answer.

A chat is written with the model's own template, in a process that can do nothing else
(`fusion.runtime.serving.requests.chat_template`), and goes to the gateway as one prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fusion.cli.asking import settings
from fusion.cli.asking.answer_trace import AnswerTrace
from fusion.cli.terminal.output import Output
from fusion.swarm.errors import NotAdmitted, RemoteError

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.manifest import Manifest
    from fusion.runtime.serving.requests.chat_format import ChatFormat
    from fusion.runtime.serving.requests.chat_template import ChatTemplates
    from fusion.runtime.serving.requests.client import GrantsFor
    from fusion.runtime.serving.requests.request import Answer, GenerateRequest
    from fusion.swarm.directory.records import JobId
    from fusion.swarm.transport import PeerId

    # By name, for what gave it ("NAME", "/model"), which an error names.
    Find = Callable[[str, str], Awaitable[tuple[JobId, Manifest]]]


@dataclass
class Turn:
    """An answer as far as it came."""

    trace: AnswerTrace = field(default_factory=AnswerTrace)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    answer: Answer | None = None  # once it has ended


class Partner:
    """The model that is talked with. Its coroutines run in the loop."""

    def __init__(
        self,
        context: Context,
        gateway: PeerId,
        find: Find,
        shown: GrantsFor,
        templates: ChatTemplates,
        request: GenerateRequest,
        output: Output,
    ) -> None:
        """`find`: the model of a name, and `shown`: why we may prompt it, both as `fusion.cli` has them."""
        self.name = ""
        self._context = context
        self._gateway = gateway
        self._find = find
        self._grants = shown
        self._templates = templates
        self._request = request
        self._output = output
        self._job: JobId
        self._form: ChatFormat

    async def choose(self, name: str, option: str) -> None:
        """Go on with this model. ValueError where there is none, or it has no chat template; BlobError."""
        from fusion.runtime.serving.requests.chat_format import NoTemplate, read_format

        job, manifest = await self._find(name, option)
        self._context.leases.know(manifest.law(job))
        try:
            form = await read_format(self._context.blobs.of(job), manifest)
        except NoTemplate as error:
            if manifest.serve is not None and manifest.serve.outputs:
                how = f"give it arrays with fusion-peer run {manifest.name}"
            else:
                how = f'let it go on from a text with fusion-peer generate "..." --model {manifest.name}'
            raise ValueError(f"{error}: {how}") from None
        self.name, self._job, self._form = manifest.name, job, form

    async def answer(self, messages: Sequence[Mapping[str, str]], turn: Turn) -> None:
        """Fill `turn`, and show its text as it comes. Raises ValueError where the template or the model refuses the
        messages; SwarmError."""
        from fusion.runtime.serving.requests.chat_template import TemplateFailed, TemplatesBusy
        from fusion.runtime.serving.requests.client import another_peer, generate
        from fusion.runtime.serving.requests.request import Piece

        try:
            variables = self._form.variables(messages)
            prompt = await self._templates.render(self._job, self._form.template, variables)
        except TemplateFailed as error:
            raise ValueError(f"the chat template of {self.name} does not take this: {error}") from None
        except TemplatesBusy as error:
            raise ValueError(str(error)) from None
        context, request = self._context, replace(self._request, model=self._job, prompt=prompt)
        find = another_peer(context.directory)

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            found = await find(gone)
            self._gateway = found or self._gateway  # the next turn need not wait for the one that is gone
            return found

        asked = generate(context.transport, self._gateway, request, another, self._grants)
        turn.trace = AnswerTrace()
        try:
            async with aclosing(asked) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        turn.trace.token()
                        turn.tokens.append(piece.id)
                        self._show(turn, piece.text)
                    else:
                        # What was held back until it was certain
                        self._show(turn, piece.text[len(turn.text) :])
                        turn.answer = piece
        except NotAdmitted:
            raise
        except RemoteError as error:
            raise settings.of_question(error) from None

    async def trips(self, route: Sequence[PeerId]) -> list[float | None]:
        """Seconds from each of a route's peers to the next and back, as far as the swarm knows."""
        from fusion.swarm.links.view import link_view

        directory = self._context.directory
        view = link_view(await directory.peers(), await directory.links())
        pairs = zip(route, [*route[1:], *route[:1]], strict=True)
        return [None if one == two else view.link(one, two).rtt_seconds for one, two in pairs]

    def _show(self, turn: Turn, text: str) -> None:
        turn.text += text
        self._output.write(text)
