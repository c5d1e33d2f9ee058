"""Sampling settings, with every one that an older release does not know."""

from __future__ import annotations

from fusion.runtime.serving.requests.sampling_params import Sampling

EVERY_SETTING = Sampling(
    temperature=0.5,
    min_p=0.1,
    repetition_penalty=1.1,
    frequency_penalty=-0.5,
    presence_penalty=2.0,
    logit_bias=((3, 1.0), (4, -100.0)),
)
