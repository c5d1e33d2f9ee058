"""Measures a core's speed at a stage's work: `python tests/bench/core_work.py SECONDS` prints steps a second."""

from __future__ import annotations

import sys
import time

import torch
from torch.nn import GELU, LayerNorm, Linear, Sequential

TOKENS, WIDTH = 256, 128


def main() -> None:
    torch.set_num_threads(1)
    block = Sequential(LayerNorm(WIDTH), Linear(WIDTH, 4 * WIDTH), GELU(), Linear(4 * WIDTH, WIDTH))
    values = torch.randn(TOKENS, WIDTH)
    for _ in range(20):
        block(values).square().mean().backward()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < float(sys.argv[1]):
        block(values).square().mean().backward()
        steps += 1
    print(steps / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
