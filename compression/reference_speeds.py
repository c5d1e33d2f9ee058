"""The speeds of the codecs on a reference machine, for plans that must not depend on where they are made."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.compression.adaptive import CodecSpeed

# Dense float32 bytes a second. Half of what `codec_speed` measures on one core of an AMD EPYC of 2023 (2.6 GHz, AVX-512),
# rounded down: about an ordinary desktop of the last ten years.
REFERENCE: Mapping[str, CodecSpeed] = {
    "bf16": CodecSpeed(encode_bytes_per_second=4e9, decode_bytes_per_second=4e9),
    "fp16": CodecSpeed(encode_bytes_per_second=4e9, decode_bytes_per_second=8e9),
    "int8": CodecSpeed(encode_bytes_per_second=1.2e9, decode_bytes_per_second=1.5e9),
    "int4": CodecSpeed(encode_bytes_per_second=1.2e9, decode_bytes_per_second=1.5e9),
    "topk": CodecSpeed(encode_bytes_per_second=0.8e9, decode_bytes_per_second=3e9),
}
