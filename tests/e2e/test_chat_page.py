"""The chat page as a person has it: a real browser, real peers, the keyboard, a phone, and a peer that is killed meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.browser import MISSING, asked_for, browser
from support.chat_model import chat_prompt, save_model, teach, tokenizer
from support.families import greedy
from support.jobs import with_client

from fusion.cli.job_client import find_job
from fusion.runtime.job.context import Context
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

QUESTION, NEXT = "class Socket:", "def read(<b>self</b>):"
STAGES, TOKENS, LONG, POSITIONS = 2, 24, 1200, 1600
MARKUP = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
WAIT_SECONDS = 120.0


def speaker_of_markup(directory: Path) -> tuple[Any, Any]:
    """A chat model that says MARKUP in its answer to QUESTION, and its tokenizer."""
    made = tokenizer()
    made.add_tokens([MARKUP])
    model = save_model(directory, made, POSITIONS)
    teach(model, made, MARKUP, chat_prompt(made, [("user", QUESTION)]), TOKENS // 2)
    model.save_pretrained(directory)
    return model, made


class Page:
    """What one sees, and what one types."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.until(lambda: self.js("return document.getElementById('model').value"))

    def js(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def until(self, held: Callable[[], Any]) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_SECONDS, 0.02).until(lambda _: held())

    def type(self, *strokes: str) -> None:
        """Each of them into what has the focus then."""
        for keys in strokes:
            self.driver.switch_to.active_element.send_keys(keys)

    def said(self, role: str) -> list[str]:
        found: list[str] = self.js(
            f"return [...document.querySelectorAll('#said article.{role}')].map((each) => each.textContent)"
        )
        return found

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.js(
            f"return [...document.querySelectorAll('{selector}')].map((each) => each.innerText)"
        )
        return found

    @property
    def focus(self) -> str:
        return str(self.js("return document.activeElement.id"))

    def ended(self) -> str:
        """The last answer, once it has come to its end."""
        self.until(lambda: self.js("return document.getElementById('stop').hidden"))
        assert self.said("error") == []
        return self.said("assistant")[-1]

    def answering(self, characters: int) -> None:
        """Wait until so much of an answer stands there, and it goes on."""
        self.until(lambda: len("".join(self.texts("#said article.running"))) >= characters)


def test_a_person_chats_with_the_keyboard_while_a_peer_is_killed(peers: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    gateway = peers.start("peer-0", "--memory", "64KiB")  # too little to hold a stage itself
    others = [peers.start(f"peer-{i}", bootstrap=(gateway.address,)) for i in (1, 2)]
    model, made = speaker_of_markup(tmp_path / "model")
    home = ("--home", str(gateway.home))
    peers.run("serve", str(tmp_path / "model"), "--name", "small", "--stages", str(STAGES), *home)
    ids = ",".join(map(str, chat_prompt(made, [("user", QUESTION)])))
    [plain] = peers.run("generate", "--prompt-ids", ids, "--max-tokens", str(TOKENS), *home)
    answer = made.decode(plain["tokens"])
    assert MARKUP in answer

    url = gateway.ready["http"].removesuffix("v1")
    with browser(peers.root / "browser") as driver:
        page = Page(driver, url)
        assert page.focus == "text"
        for stop in ("said", "new", ""):  # what the keyboard comes to on its way to the settings
            page.type(Keys.SHIFT + Keys.TAB)
            assert page.focus == stop
        page.type(Keys.ENTER, Keys.TAB)
        for field, value in (("temperature", "0"), ("tokens", str(TOKENS))):
            assert page.focus == field
            page.type(Keys.CONTROL + "a", value, Keys.TAB)
        page.type(Keys.TAB, Keys.TAB, Keys.TAB)
        assert page.focus == "text"

        page.type(QUESTION, Keys.ENTER)
        assert page.ended() == answer
        page.type(NEXT, Keys.ENTER)
        text = made.decode(
            greedy(
                model, chat_prompt(made, [("user", QUESTION), ("assistant", answer), ("user", NEXT)]), TOKENS
            )[0]
        )
        assert page.ended() == text
        assert page.said("user") == [QUESTION, NEXT] and page.focus == "text"
        assert page.js("return document.querySelectorAll('#said img, #said script, #said b').length") == 0
        assert page.js("return document.title") == "Fusion Peer"
        assert [each.split()[:2] for each in page.texts(".route:last-child li")][1:] == [
            [f"{stage}:", friendly_name(PeerId(peer))] for stage, peer in enumerate(plain["route"])
        ]

        page.js(f"document.getElementById('tokens').value = {LONG}")
        page.type(QUESTION, Keys.ENTER)
        page.answering(40)
        page.type(Keys.ESCAPE)
        stopped = page.ended()
        page.type(Keys.SHIFT + Keys.TAB, Keys.SHIFT + Keys.TAB, Keys.ENTER)  # a new chat
        assert page.said("user") == [] and page.focus == "text"
        whole = made.decode(greedy(model, chat_prompt(made, [("user", QUESTION)]), LONG)[0])
        assert stopped and len(stopped) < len(whole)

        with_client(peers.root / "client", gateway.address, stand_by)
        page.type(QUESTION, Keys.ENTER)
        page.answering(40)
        victim = page.texts(".route li")[1].split()[1]
        page.until(lambda: [each for each in page.texts(".route li") if each.endswith(" ms")])
        [killed] = [peer for peer in others if friendly_name(PeerId(peer.peer_id)) == victim]
        peers.stop(killed, signal.SIGKILL)
        page.until(lambda: [each for each in page.texts(".note") if each.endswith(f"from {victim}")])
        assert page.said("assistant")[-1] != whole, "it ended before the peer did"
        assert page.ended() == whole
        assert victim not in " ".join(page.texts(".route li"))

        phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        assert page.js("return document.documentElement.scrollWidth") == 390
        assert page.js("return document.getElementById('said').scrollWidth") <= 390
        for name in ("text", "send"):
            box = page.js(f"return document.getElementById('{name}').getBoundingClientRect().toJSON()")
            assert 0 <= box["left"] < box["right"] <= 390 and 400 < box["top"] < box["bottom"] <= 844
            assert box["height"] >= 44
        asked = asked_for(driver, url)
        assert f"{url}page.js" in asked and all(each.startswith(url) for each in asked)
        assert [each for each in driver.get_log("browser") if each["level"] == "SEVERE"] == []


async def stand_by(context: Context) -> None:
    """Wait until each stage has somebody ready beside its owner."""
    job = (await find_job(context, "small")).job
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            stages = [await context.directory.claims(job, stage) for stage in range(STAGES)]
            if all(sum(claim.ready for claim in claims) >= 2 for claims in stages):
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(HEARTBEAT_SECONDS)  # until the gateway looks again
