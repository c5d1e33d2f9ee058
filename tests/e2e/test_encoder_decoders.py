"""Encoder-decoders from their directories on three peers, by the commands, against `generate()`; one of the peers is killed while an answer
comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoder_decoders import END, START, build, generated, source
from support.jobs import answer_across_a_kill
from support.source_tokenizer import tokenizer_of_sources

from fusion.runtime.serving.requests.request import GenerateRequest

pytestmark = pytest.mark.e2e

STAGES, NEW = 3, 40
LONG, KILLED_AFTER = 100, 10  # tokens of the answer in whose middle a peer dies, and pieces of it before that


def served(peers: Any, family: str, folder: Path, **more: Any) -> tuple[Any, list[str], list[Any]]:
    """The module that three peers serve, how to ask one of them, and the peers."""
    swarm = peers.swarm(STAGES)
    model = build(family, **more)
    model.save_pretrained(folder)
    tokenizer_of_sources().save(str(folder / "tokenizer.json"))
    home = str(swarm[0].home)
    records = peers.run("serve", str(folder), "--name", family, "--stages", str(STAGES), "--home", home)
    assert [record["event"] for record in records] == ["launched", "held", "token", "serving"]
    ask = ["generate", "--model", family, "--max-tokens", str(NEW), "--home", home]
    return model, ask, swarm


def wanted(model: Any, given: Any, new: int = NEW) -> list[int]:
    tokens = generated(model, given, new)
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_text_is_read_and_answered_also_when_a_peer_dies_in_the_middle(
    family: str, peers: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of_sources()
    model, ask, swarm = served(peers, family, tmp_path / "model", vocab_size=tokenizer.get_vocab_size())
    text = "def open(name):\n    return "
    ids = tokenizer.encode(text).ids
    [record] = peers.run(*ask, text)
    assert record["tokens"] == wanted(model, torch.tensor([ids])) and len(set(record["route"])) == STAGES
    assert record["text"] == tokenizer.decode([t for t in record["tokens"] if t != END])
    named = {peer.peer_id: peer for peer in swarm}
    victim = next(named[each] for each in record["route"] if named[each] is not swarm[0])
    given = source(family, 25, 4)
    request = GenerateRequest(model=family, prompt_ids=tuple(given[0].tolist()), max_tokens=LONG)
    answer = answer_across_a_kill(peers.root / "client", swarm[0], request, victim, KILLED_AFTER)
    assert list(answer.tokens) == wanted(model, given, LONG) and len(answer.tokens) > KILLED_AFTER
    assert victim.peer_id not in answer.route
    [record] = peers.run(*ask, "--prompt-ids", ",".join(map(str, given[0].tolist())))
    assert record["tokens"] == wanted(model, given) and victim.peer_id not in record["route"]


@pytest.mark.slow
def test_sound_is_heard_as_features(peers: Any, tmp_path: Path) -> None:
    model, ask, _ = served(peers, "whisper", tmp_path / "model")
    given = source("whisper", 0, 2)
    np.save(tmp_path / "sound.npy", given[0].numpy())
    [record] = peers.run(*ask, "--features", str(tmp_path / "sound.npy"))
    assert record["tokens"] == wanted(model, given)
    assert START not in record["tokens"][:1]
