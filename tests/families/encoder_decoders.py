"""The trial of an encoder-decoder (T5, BART, Whisper): a small model, saved, opened and cut into three stages, whose encoder runs
once for a session, against `generate()` and the logits of the whole sequence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from families.tiny import POSITIONS, VOCABULARY, tiny
from families.trial import NEW, TOLERANCE, Outcome, line, written
from transformers.models.auto import modeling_auto

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.source import halves
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.end_to_end import end_to_end
from fusion.runtime.capture import sources
from fusion.runtime.capture.encoder_decoder import auto_class, reads_source
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

SOURCES = (1, 7, 32, 50, 100)  # tokens; 32 is a whole number of the blocks of a tiny model
READS = " (reads a source)"  # behind the name of a family, in results and on the page


def families() -> list[str]:
    """The families of transformers that turn text or speech into text and have an encoder according to their configuration."""
    names = {
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    return [f"{name}{READS}" for name in sorted(names) if _has_encoder(name)]


def _has_encoder(name: str) -> bool:
    try:
        return reads_source(transformers.CONFIG_MAPPING[name]())
    except Exception:  # a configuration that is made of two others, and cannot be had without them
        return False


def outcome(family: str, directory: Path) -> Outcome:
    """The outcome of a family, as of `families.trial.outcome`."""
    name = family.removesuffix(READS)
    try:
        config = tiny(transformers.CONFIG_MAPPING[name], name)
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # in the files of all trained ones; its class leaves it to them
        kind = getattr(transformers, auto_class(config))
        written(config, kind, directory)
        theirs = kind.from_pretrained(directory, dtype=torch.float32).eval()
        start = config.decoder_start_token_id
        theirs.generation_config = transformers.GenerationConfig(decoder_start_token_id=start, pad_token_id=0)
        _wanted(theirs, *_drawn(theirs, 7, 0), torch.tensor([[start] * 5]))
    except Exception as error:  # whatever transformers raises for a configuration that does not fit together
        return Outcome(family=family, served="not tried", why=line(error))
    try:
        ours = sources.huggingface(HuggingFaceConfig(path=directory), training=False)
        assert ours.source is not None
        longest = {"maximum_sequence": ours.about.max_sequence, "maximum_source": ours.source.length}
        graph = serving_graph(ours.inference, **longest)
    except (JobError, GraphError) as error:
        return Outcome(family=family, served="refused", why=line(error).replace(f"{directory}", "DIR"))
    except Exception as error:  # a bug: a user would see a traceback
        return Outcome(family=family, served="wrong", why=f"{type(error).__name__}: {line(error)}")
    try:
        worst, tokens, differs = _compared(theirs, ours, ours.source, graph, start)
    except Exception as failure:
        return Outcome(family=family, served="wrong", why=f"{type(failure).__name__}: {line(failure)}")
    served = "wrong" if differs or worst > TOLERANCE else "cached"
    [both] = map(halves, split(graph, ()))
    together = both is not None and end_to_end(both.decode.graph) is not None
    return Outcome(family=family, served=served, why=differs, error=worst, tokens=tokens, together=together)


def _drawn(model: Any, length: int, seed: int) -> tuple[str, torch.Tensor]:
    """The name and value of a source: token ids (1, length), or features, which have one length."""
    draw = torch.Generator().manual_seed(seed)
    channels = getattr(model.config, "num_mel_bins", 0)
    if channels:
        frames = 2 * model.config.max_source_positions
        return "input_features", torch.randn(1, channels, frames, generator=draw)
    return "input_ids", torch.randint(3, VOCABULARY, (1, length), generator=draw)


def _wanted(model: Any, name: str, given: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (length, vocabulary) over the whole of `tokens` (1, length) at once."""
    with torch.inference_mode():
        found: torch.Tensor = model(
            **{name: given},
            decoder_input_ids=tokens,
            decoder_attention_mask=torch.ones_like(tokens),
            use_cache=False,
        ).logits
    return found[0]


def _compared(
    theirs: Any, ours: LanguageModel, source: SourceConfig, graph: Graph, start: int
) -> tuple[float, int, str]:
    """The largest error over sources of several lengths, how much the longest answer varies, and the first wrong answer."""
    cuts = sorted(random.Random(0).sample(range(1, len(graph.nodes)), 2))
    stages = [TorchDecodingStage(s, ours.read(s.graph.variables)) for s in split(graph, cuts)]
    worst, most, differs = 0.0, 0, ""
    new = NEW["cached"]
    for seed, length in enumerate(SOURCES):
        name, given = _drawn(theirs, length, seed)
        with torch.inference_mode():
            whole = theirs.generate(
                **{name: given}, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None
            )
        answer = whole[0, -new:].tolist()
        tokens = torch.tensor([[start, *answer]])
        logits = _wanted(theirs, name, given, tokens)[:-1]
        found = _decoded(stages, given, tokens[:, :-1])
        worst = max(worst, float((found - logits).abs().max()) / max(1.0, float(logits.abs().max())))
        chosen = found.argmax(-1).tolist()
        if chosen != answer and chosen != logits.argmax(-1).tolist() and not differs:
            at = next(i for i, (a, b) in enumerate(zip(chosen, answer, strict=True)) if a != b)
            differs = f"token {at + 1} for a source of {given.shape[-1]} is {chosen[at]}, that of generate() {answer[at]}"
        most = max(most, len(set(answer)))
    return worst, most, differs


def _decoded(stages: list[TorchDecodingStage], given: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (length, vocabulary) of the stages after each of `tokens` (1, length)."""
    length = given.shape[-1]
    values = {"source_features" if given.is_floating_point() else "source_ids": given}
    for stage in stages:
        stage.close("s")
        stage.open("s", POSITIONS, length)
        values.update(*stage.run([Piece("s", -length, values)]))
    found = []
    for at in range(tokens.shape[1]):
        values = {"input_ids": tokens[:, at : at + 1], "position_ids": torch.tensor([[at]])}
        for stage in stages:
            values.update(*stage.run([Piece("s", at, values)]))
        found.append(values["result/0"][0, -1])
    return torch.stack(found)
