"""A model that makes vectors of texts on three real peers, asked by OpenAI's own client, with an owner killed on the way."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.embedding_model import embedded, save, tokenizer

pytestmark = pytest.mark.e2e

STAGES = 2
TEXTS = ["def open(name):", "class Socket:", "import os", "import re", "return " * 40]


def until_somebody_stands_by(peers: Any, home: str, stage: int) -> None:
    """Until then nobody else has the stage's weights."""
    deadline = time.monotonic() + 60
    while not any(
        each["stage"] == stage and each["role"] == "standby" and each["ready"]
        for each in peers.run("status", "--home", home)[0]["standbys"]
    ):
        assert time.monotonic() < deadline, "nobody stands by"
        time.sleep(0.5)


@pytest.mark.slow
def test_a_model_of_sentence_transformers_answers_for_embeddings(peers: Any, tmp_path: Path) -> None:
    swarm = peers.swarm(STAGES + 1)
    made = tokenizer()
    own = save(
        *(tmp_path / "model", "bert", "mean_tokens"), normalized=True, vocabulary=made.get_vocab_size()
    )
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    home = str(swarm[0].home)
    records = peers.run(
        "serve", str(tmp_path / "model"), "--name", "vectors", "--stages", str(STAGES), "--home", home
    )
    assert [record["event"] for record in records] == ["launched", "held", "serving"]
    ids = [made.encode(text).ids for text in TEXTS]
    wanted = embedded(own, "mean_tokens", True, ids).numpy()

    def vectors(client: openai.OpenAI, given: Any, **options: Any) -> Any:
        answer = client.embeddings.create(model="vectors", input=given, **options)
        assert [each.index for each in answer.data] == list(range(len(answer.data)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        return np.array([each.embedding for each in answer.data])

    for peer in swarm:
        with openai.OpenAI(base_url=peer.ready["http"], api_key="none", max_retries=0) as client:
            assert [each.id for each in client.models.list()] == ["vectors"]
            for given, options in (
                (TEXTS, {}),  # as base64, which the client asks for by itself
                (TEXTS, {"encoding_format": "float", "dimensions": 32}),
                (ids, {}),
            ):
                assert np.abs(vectors(client, given, **options) - wanted).max() < 1e-5
            assert np.abs(vectors(client, TEXTS[0]) - wanted[:1]).max() < 1e-5
            for wrong, said in (
                ({"input": "a " * 200}, "positions"),
                ({"input": [10**6]}, "token ids"),
                ({"input": [""], "dimensions": 8}, "dimensions"),
            ):
                with pytest.raises(openai.BadRequestError, match=said):
                    client.embeddings.create(model="vectors", **wrong)
            with ThreadPoolExecutor(16) as pool:  # more than stages run at once
                together = pool.map(lambda text: vectors(client, text), TEXTS * 8)
                assert np.abs(np.concatenate(list(together)) - np.tile(wanted, (8, 1))).max() < 1e-5
            with pytest.raises(openai.BadRequestError, match="generates nothing"):
                client.completions.create(model="vectors", prompt="a")
    np.savez(tmp_path / "x.npz", input_ids=np.array([ids[0]]))
    files = ("--input", str(tmp_path / "x.npz"), "--output", str(tmp_path / "y.npz"))
    [record] = peers.run("run", "vectors", *files, "--home", home)
    assert np.abs(np.load(tmp_path / "y.npz")["embedding"] - wanted[:1]).max() < 1e-5
    assert len(set(record["route"])) == STAGES
    gone = next(peer for peer in swarm[1:] if peer.peer_id in record["route"])
    stage = record["route"].index(gone.peer_id)
    until_somebody_stands_by(peers, home, stage)
    peers.stop(gone, signal.SIGKILL)
    with openai.OpenAI(base_url=swarm[0].ready["http"], api_key="none", max_retries=2) as client:
        assert np.abs(vectors(client, TEXTS) - wanted).max() < 1e-5
