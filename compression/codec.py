"""The codecs by name. See `spec.py` for how they are spelt, `encoding.py` for what they offer."""

from __future__ import annotations

from functools import lru_cache

from fusion.compression.dense import NONE as NONE
from fusion.compression.encoding import DTYPES as DTYPES
from fusion.compression.encoding import Codec as Codec
from fusion.compression.encoding import Decoded as Decoded
from fusion.compression.encoding import Encoded as Encoded
from fusion.compression.encoding import Sparse as Sparse
from fusion.compression.packed import Packed
from fusion.compression.spec import parse
from fusion.compression.topk import TopK


@lru_cache(maxsize=1024)
def codec(spec: str) -> Codec:
    """The codec of that spec; codecs have no state, so each is made once. ValueError for an unknown one."""
    parsed = parse(spec)
    if parsed.family == "none":
        return NONE
    return TopK(parsed) if parsed.family == "topk" else Packed(parsed)
