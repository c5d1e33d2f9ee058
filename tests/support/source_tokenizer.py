"""A small tokenizer in the form in which models have theirs."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def tokenizer_of_sources() -> Tokenizer:
    """A small byte-pair encoding trained on modules of this Python. It has only their characters, so any tokens decode to
    text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [str(folder / f"{name}.py") for name in ("argparse", "socket", "tarfile", "typing")]
    tokenizer.train(files, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    return tokenizer
