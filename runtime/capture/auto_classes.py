"""The auto class of transformers that builds the module of a directory, by its configuration. `library`: transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fusion.runtime.capture.encoder_decoder import SPEECH, architectures, auto_class, reads_source
from fusion.runtime.capture.text_encoder import Pooling, pooling_of
from fusion.runtime.job.errors import JobError

# Vision-language models that can be served on text alone: `make models` compares them with `generate()`. Not all can: PaliGemma reads a
# prompt bidirectionally.
_VISION_LANGUAGE = frozenset({
    "aria", "aya_vision", "cohere2_vision", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "emu3",
    "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "granite_docling",
    "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "lfm3_vl",
    "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr",
    "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "mistral4", "mistral_large4", "mllama", "muse_glimmer",
    "ovis2", "paddleocr_vl", "pp_chart2table", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_vl",
    "qwen3_vl_moe", "smolvlm", "unlimited_ocr", "video_llama_3", "video_llava", "vipllava",
})  # fmt: skip


def model_class(config: Any, directory: Path, library: Any) -> str:
    """The class of transformers that builds the module. JobError for a model that generates no text, or is not known to be served correctly."""
    if model_pooling(config, directory, library) is not None:
        return "AutoModel"
    if reads_source(config):
        return _encoder_decoder_class(config, directory, library)
    class_names = architectures(config)
    if config.model_type not in _VISION_LANGUAGE and type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    if type(config) not in library.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise JobError(
            f"{directory} is not a language model that transformers can build: it is of the kind {config.model_type}"
            + (f", a {class_names[0]!r:.80}" if class_names else "")
        )
    if config.model_type not in _VISION_LANGUAGE:
        raise JobError(
            f"{directory} holds a model of images and texts; of some such kinds texts alone are served (docs/models.md), and "
            f"{config.model_type} is not among them"
        )
    return "AutoModelForImageTextToText"


def _encoder_decoder_class(config: Any, directory: Path, library: Any) -> str:
    kind = auto_class(config)
    mapping = (
        library.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        if kind == SPEECH
        else library.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    if type(config) not in mapping:
        raise JobError(
            f"{directory} holds an encoder-decoder of the kind {config.model_type}: served are those that read a text, and those that read "
            "sound as Whisper does, a spectrogram of num_mel_bins channels"
        )
    return kind


def model_pooling(config: Any, directory: Path, library: Any) -> Pooling | None:
    """The pooling of an embedding model; None for a model that generates."""
    return pooling_of(directory, encoder=_is_encoder(config, library))


def _is_encoder(config: Any, library: Any) -> bool:
    """Whether the directory holds a bare encoder, or one for masked language modelling."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False):
        return False
    class_names = architectures(config)
    # XLMWithLMHeadModel is a generating model.
    bare = [re.search(r"(?<!LMHead)Model$|ForMaskedLM$", name) for name in class_names]
    if not class_names or not all(bare):
        return False
    return type(config) in library.MODEL_FOR_MASKED_LM_MAPPING
