"""Noisy discs and their outlines as discs.npz, beside this file: `python examples/unet/pack.py`. Needs NumPy alone."""

from pathlib import Path

import numpy as np

SIDE, COUNT = 32, 1000
random = np.random.default_rng(0)
rows, columns = np.mgrid[:SIDE, :SIDE]
images, masks, areas = [], [], []
for _ in range(COUNT):
    radius, x, y = random.uniform(4, 9), *random.uniform(9, SIDE - 9, 2)
    mask = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
    images.append(mask + random.normal(0, 0.6, mask.shape))
    masks.append(mask)
    areas.append(mask.mean())
np.savez(
    Path(__file__).with_name("discs.npz"),
    images=np.array(images, np.float32)[:, None],  # (1000, 1, 32, 32)
    masks=np.array(masks, np.float32)[:, None],  # what is to be found in them
    areas=np.array(areas, np.float32),  # and how much of the image it is
)
