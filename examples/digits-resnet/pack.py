"""scikit-learn's handwritten digits as digits.npz, beside this file: `python examples/digits-resnet/pack.py`.

Only this machine needs scikit-learn (`pip install scikit-learn`); the swarm sees arrays.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
np.savez(
    Path(__file__).with_name("digits.npz"),
    images=digits.images[:, None].astype(np.float32) / 16,  # (1797, 1, 8, 8), from 0 to 1
    labels=digits.target,  # (1797,) int64
)
