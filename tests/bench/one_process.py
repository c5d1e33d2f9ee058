"""The baselines, each in a process of its own with one thread: plain PyTorch, and transformers' `generate()`.

    python one_process.py train  '{"blocks": 8, "width": 512, ...}'   -> {"step_seconds": [...], "peak_bytes": n}
    python one_process.py decode '{"path": DIR, "tokens": 64, ...}'   -> {"tokens_per_second": x, "peak_bytes": n}

Nothing of the swarm is used here: what it is compared with must not share its code.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
from torch.nn import functional


def train(request: dict[str, Any]) -> dict[str, Any]:
    """The seconds of each optimizer step of the built-in GPT: accumulated microbatches, clipping, AdamW."""
    from fusion.runtime.capture.models import GPT
    from fusion.runtime.job.spec import GPTConfig

    torch.manual_seed(0)
    device, sequence = request.get("device", "cpu"), request["sequence"]
    model = GPT(GPTConfig(**request["model"], sequence=sequence)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    positions = torch.arange(sequence, device=device).expand(request["microbatch_size"], -1)
    data = torch.randint(0, 256, (request["microbatch_size"], sequence + 1), device=device)
    seconds = []
    for _ in range(request["steps"]):
        start = time.perf_counter()
        for _ in range(request["microbatches"]):
            logits = model(data[:, :-1], positions)
            loss = functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
            (loss / request["microbatches"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - start)
    return {"step_seconds": seconds}


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of greedy `generate()` after one warm-up, prompt included, as a user measures them."""
    from transformers import AutoModelForCausalLM

    device = request.get("device", "cpu")
    dtype = getattr(torch, request.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(request["path"], dtype=dtype).eval().to(device)
    batch = request.get("batch", 1)
    prompt = torch.tensor([request["prompt"]] * batch, device=device)
    # Without a mask of its own generate() would pass over every token of the prompt that is the padding's.
    mask = torch.ones_like(prompt)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}
    model.generate(prompt, max_new_tokens=4, **options)
    rates = []
    for _ in range(request.get("repeats", 1)):
        start = time.perf_counter()
        output = model.generate(prompt, max_new_tokens=request["tokens"], **options)
        rates.append(batch * request["tokens"] / (time.perf_counter() - start))
    return {"tokens_per_second": rates, "ids": output[0, prompt.shape[1] :].tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = {"train": train, "decode": decode}[sys.argv[1]](json.loads(sys.argv[2]))
    answer["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(answer))
