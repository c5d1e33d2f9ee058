"""Log-probabilities of prompts over HTTP, of models that one process holds and that three hold, are those of transformers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.chat_model import save_model, tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

POSITIONS, TOP, CLOSE = 4096, 3, 1e-4
SERVED = {"alone": 1, "split": 3}  # stages of each


def prompt_of(length: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (length,), generator=generator).tolist()


def furthest(model: Any, tokens: Sequence[int], told: Any) -> float:
    """How far a log-probability that is told lies from the model's own, at most."""
    with torch.inference_mode():
        rows = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].double().log_softmax(-1)
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == len(tokens)
    own = [abs(v - float(r[t])) for r, t, v in zip(rows, tokens[1:], told.token_logprobs[1:], strict=False)]
    best = [
        abs(value - other)
        for row, top in zip(rows, told.top_logprobs[1:], strict=False)
        for value, other in zip(
            sorted(top.values())[-TOP:], row.topk(TOP).values.flip(0).tolist(), strict=True
        )
    ]
    return max([0.0, *own, *best])


def test_prompts_are_told_of_over_one_and_three_peers_beside_others_and_across_a_kill(
    peers: Any, tmp_path: Path
) -> None:
    swarm = peers.swarm(3)
    # The gateway has no room for a stage, nor for a replica of one.
    swarm.append(peers.start("peer-3", "--memory", "1MiB", bootstrap=(swarm[0].address,)))
    home = ("--home", str(swarm[3].home))
    made = tokenizer()
    model = save_model(tmp_path / "model", made, POSITIONS)
    for name, stages in SERVED.items():
        peers.run("serve", str(tmp_path / "model"), "--name", name, "--stages", str(stages), *home)
    with openai.OpenAI(base_url=swarm[3].ready["http"], api_key="none", max_retries=0) as client:

        def ask(name: str, prompt: Any, **more: Any) -> Any:
            return client.completions.create(
                model=name, prompt=prompt, temperature=0, echo=True, logprobs=TOP, **{"max_tokens": 1, **more}
            )

        prompts = [prompt_of(length, model.config.vocab_size) for length in (1, 7, 300)]
        for name in SERVED:
            far = list[float]()
            beside = threading.Thread(target=ask, args=(name, prompt_of(40, 100)), kwargs={"max_tokens": 200})
            beside.start()
            for prompt in prompts:
                [alone] = ask(name, prompt, max_tokens=0).choices
                far.append(furthest(model, prompt, alone.logprobs))
            for prompt, choice in zip(prompts, ask(name, prompts).choices, strict=True):
                new = made.token_to_id(
                    choice.logprobs.tokens[-1].replace(" ", "\u0120").replace("\n", "\u010a")
                )
                assert new is not None
                far.append(furthest(model, [*prompt, new], choice.logprobs))
            beside.join()
            print(name, far)
            assert max(far) < CLOSE
        _across_a_kill(ask, model, {peer.peer_id: peer for peer in swarm[:3]})


def _across_a_kill(ask: Callable[..., Any], model: Any, owners: dict[str, Any]) -> None:
    """The owner of a stage, not the gateway, is killed once something has been told of long prompts."""
    prompts = [prompt_of(3000 + i, model.config.vocab_size) for i in range(4)]
    fields = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    told = [openai.types.completion_choice.Logprobs(**{field: [] for field in fields}) for _ in prompts]
    routes, killed_at, victim = dict[int, list[str]](), 0, ""
    for chunk in ask("split", prompts, stream=True, extra_body={"stream_options": {"include_route": True}}):
        if (found := getattr(chunk, "route", None)) is not None:
            routes[found["index"]] = [each["peer"] for each in found["stages"]]
        for choice in chunk.choices:
            for field in fields:
                getattr(told[choice.index], field).extend(getattr(choice.logprobs, field, None) or [])
        done = sum(len(each.tokens or ()) for each in told)
        if not killed_at and routes and done > 100:
            killed_at, victim = done, next(iter(routes.values()))[1]
            owners[victim].process.send_signal(signal.SIGKILL)
    assert killed_at and all(len(each) == SERVED["split"] and victim not in each for each in routes.values())
    far = list[float]()
    for prompt, each in zip(prompts, told, strict=True):
        assert len(each.tokens or ()) == len(prompt) + 1
        for field in fields:
            del getattr(each, field)[len(prompt) :]
        far.append(furthest(model, prompt, each))
    print("killed at", killed_at, far)
    assert max(far) < CLOSE
