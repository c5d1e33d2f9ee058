"""Turns with a model of the in-memory swarm, whose template a real process renders."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.http_api import TEMPLATE
from support.served import MAX_SEQUENCE, Swarm, reference, swarm_of

from fusion.cli.asking.conversation import Conversation
from fusion.cli.asking.partner import Partner, Turn
from fusion.cli.terminal.output import Output
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.model_files import CHAT_TEMPLATE_FILE
from fusion.runtime.serving.requests import client
from fusion.runtime.serving.requests.chat_template import ChatTemplates
from fusion.runtime.serving.requests.request import GenerateRequest
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

pytestmark = [pytest.mark.process, pytest.mark.heavy]


@asynccontextmanager
async def partner_of(home: Path, template: str | None) -> AsyncIterator[tuple[Swarm, Partner, io.StringIO]]:
    """A byte-level llama on peer 0; who talks with it is peer 1, through peer 0."""
    async with swarm_of(2, home) as swarm, aclosing(ChatTemplates()) as templates:
        context = swarm.peers[1].context
        files = [] if template is None else [(CHAT_TEMPLATE_FILE, await context.blobs.put(template.encode()))]
        await swarm.serve("llama", 1, byte_level=True, files=tuple(files))

        async def find(name: str, option: str) -> tuple[JobId, Manifest]:
            [found] = swarm.manifests.items()
            return found

        async def shown(job: JobId) -> tuple[bytes, ...]:
            return ()

        request = GenerateRequest(prompt="", chat=True, max_tokens=1024)
        said = io.StringIO()
        partner = Partner(context, swarm.peers[0].id, find, shown, templates, request, Output(stdout=said))
        yield swarm, partner, said


def test_a_turn_is_shown_as_it_comes_and_one_that_is_stopped_frees_its_session(tmp_path: Path) -> None:
    async def main() -> None:
        async with partner_of(tmp_path, TEMPLATE) as (swarm, partner, said):
            await partner.choose("llama", "NAME")
            talk, turn = Conversation(), Turn()
            asking = asyncio.create_task(partner.answer(talk.with_question("Hi"), turn))
            async with asyncio.timeout(30):
                while len(turn.tokens) < 3:
                    await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait((asking,))
            await swarm.freed()
            prompt = list(b"user: Hi\nassistant:")
            whole = reference("llama", prompt, MAX_SEQUENCE - len(prompt))
            count = len(turn.tokens)
            assert turn.answer is None and 3 <= count < len(whole) and turn.tokens == whole[:count]
            assert said.getvalue() == turn.text

            talk.add("Hi", "Yo")
            turn = Turn()
            await partner.answer(talk.with_question("And?"), turn)
            prompt = list(b"user: Hi\nassistant: Yo\nuser: And?\nassistant:")
            assert turn.tokens == reference("llama", prompt, MAX_SEQUENCE - len(prompt))
            assert turn.answer is not None and turn.answer.text == turn.text
            assert said.getvalue().endswith(turn.text)
            assert await partner.trips(turn.answer.route) == [None]
            await swarm.freed()
            with pytest.raises(ValueError, match="prompt: "):  # bad input, as with `generate`
                await partner.answer(talk.with_question("And?" * 9999), Turn())

    asyncio.run(main())


def test_the_peer_that_went_on_for_one_that_vanished_is_asked_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with partner_of(tmp_path, TEMPLATE) as (swarm, partner, _):
            vanished: list[frozenset[PeerId]] = []

            def another_peer(directory: Directory) -> client.Another:
                async def find(gone: frozenset[PeerId]) -> PeerId:
                    vanished.append(gone)
                    return swarm.peers[0].id

                return find

            monkeypatch.setattr(client, "another_peer", another_peer)
            await partner.choose("llama", "NAME")
            nobody = partner._gateway = PeerId("nobody")
            for _ in range(2):
                turn = Turn()
                await partner.answer(Conversation().with_question("Hi"), turn)
                assert turn.answer is not None
            assert vanished == [{nobody}]
            await swarm.freed()

    asyncio.run(main())


def test_a_model_that_answers_in_one_run_is_not_said_to_go_on_from_a_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with partner_of(tmp_path, None) as (swarm, partner, _):
            [(job, manifest)] = swarm.manifests.items()
            assert manifest.serve is not None
            swarm.manifests[job] = replace(manifest, serve=replace(manifest.serve, outputs=("logits",)))
            with pytest.raises(
                ValueError, match=r"no chat template: give it arrays with fusion-peer run llama$"
            ):
                await partner.choose("llama", "NAME")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "llama has no chat template: .*fusion-peer generate"),
        (
            "{{ raise_exception('only one\nturn') }}",
            "the chat template of llama does not take this: only one turn$",
        ),
        ("{% for x in range(10) %}", "the chat template of llama does not take this"),
    ],
)
def test_a_template_that_is_none_or_refuses_is_one_line(
    template: str | None, named: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with partner_of(tmp_path, template) as (_, partner, said):
            with pytest.raises(ValueError, match=named) as failed:
                await partner.choose("llama", "NAME")
                await partner.answer(Conversation().with_question("Hi"), Turn())
            assert "\n" not in str(failed.value) and said.getvalue() == ""

    asyncio.run(main())
