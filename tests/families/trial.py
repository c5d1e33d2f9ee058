"""One family, tried as a user's directory would be: a small model with random weights is saved, opened and captured by our
code, cut into three stages, decoded greedily, and held against transformers' own `generate()` and logits."""

from __future__ import annotations

import inspect
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from families.tiny import MAX_PARAMETERS, POSITIONS, VOCABULARY, tiny
from transformers.models.auto import modeling_auto

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.end_to_end import end_to_end
from fusion.runtime.capture import sources
from fusion.runtime.capture.huggingface import parameters_on_meta
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

Served = Literal["cached", "recomputed", "refused", "wrong", "not tried"]

SEES = " (sees images)"  # behind the name of a family, in results and on the page
PROMPTS = (1, 7, 50)  # the last is longer than every window and chunk of a tiny model
PIECE = 24  # positions of a prompt that run at once
NEW = {"cached": 24, "recomputed": 6}
TOLERANCE = 1e-4  # of a logit, over the largest logit there is where that exceeds 1
# A few models round so much that two ways of computing them in float32 lie further apart than that. Then ours may be this many
# times as far from transformers' as that is from its own float64, and no further than what would be seen in an answer.
TIMES_ROUNDING = 4
MOST_ROUNDING = 1e-2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`error`: the largest difference of a logit to those that the model computes over the whole sequence at once, as a
    share of the largest logit where that exceeds 1. `tokens`: how many different ones there are in the longest answer.
    `rounding`: the same difference between the model in float32 and in float64, where the error exceeds the tolerance.
    `together`: whether several answers at once run as one."""

    family: str
    served: Served
    why: str = ""
    error: float | None = None
    tokens: int = 0
    rounding: float | None = None
    together: bool = False

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def of_text() -> list[str]:
    """The text families of transformers, without those whose directories are always those of a model with images."""
    seeing = {name.removesuffix(SEES) for name in that_see()}
    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - seeing)


def that_see() -> list[str]:
    """The families of transformers that turn images and text into text, and whose text part is none of its text families."""
    found = sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [f"{name}{SEES}" for name in found if not _text_alone(name)]


def _text_alone(name: str) -> bool:
    if name not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    part = transformers.CONFIG_MAPPING[name].sub_configs.get("text_config")
    return not hasattr(part, "model_type") or part in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def outcome(family: str, directory: Path) -> Outcome:
    """Try a family. All errors of our code are in the outcome; an unexpected exception counts as "wrong"."""
    name = family.removesuffix(SEES)
    kind = transformers.AutoModelForCausalLM if name == family else transformers.AutoModelForImageTextToText
    try:
        config = tiny(transformers.CONFIG_MAPPING[name], name)
        if name != family:
            _fit_sections(config.get_text_config())
        written(config, kind, directory)
        theirs = kind.from_pretrained(directory, dtype=torch.float32).eval()
        # Tokens that a family forces or keeps down are chosen by whoever asks, not by the model.
        theirs.generation_config = transformers.GenerationConfig()
        wanted(theirs, torch.zeros(1, 12, dtype=torch.int64))
        generated(theirs, torch.zeros(1, PROMPTS[-1], dtype=torch.int64), 2)
    except Exception as error:  # whatever transformers raises for a configuration that does not fit together
        return Outcome(family=family, served="not tried", why=line(error))
    try:
        ours = sources.huggingface(HuggingFaceConfig(path=directory), training=False)
        graph, served, why = rewritten(ours.inference, ours.about.max_sequence)
    except (JobError, GraphError) as error:
        return Outcome(family=family, served="refused", why=line(error).replace(f"{directory}", "DIR"))
    except Exception as error:  # a bug: a user would see a traceback
        return Outcome(family=family, served="wrong", why=f"{type(error).__name__}: {line(error)}")
    try:
        error, tokens, differs, texts = compared(theirs, ours, graph, served)
        rounding = own_rounding(theirs, kind, directory, texts) if error > TOLERANCE else None
    except Exception as failure:
        return Outcome(family=family, served="wrong", why=f"{type(failure).__name__}: {line(failure)}")
    if differs or not tolerable(error, rounding):
        served, why = "wrong", differs or why
    return Outcome(
        family=family, served=served, why=why, error=error, tokens=tokens, rounding=rounding,
        together=end_to_end(graph) is not None,
    )  # fmt: skip


def _fit_sections(config: Any) -> None:
    """Positions of images have three numbers, each of which turns a part of a head; of a text they are one."""
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        half = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
        half = int(half * rope.get("partial_rotary_factor", 1))
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def tolerable(error: float, rounding: float | None) -> bool:
    return error <= TOLERANCE or (
        rounding is not None and error <= min(TIMES_ROUNDING * rounding, MOST_ROUNDING)
    )


def own_rounding(theirs: Any, kind: Any, directory: Path, texts: list[tuple[int, torch.Tensor]]) -> float:
    """How far the model in float32 is from itself in float64, at the positions that were compared: those of each text (1, length)
    from the last of its prompt to the last but one."""
    exact = kind.from_pretrained(directory, dtype=torch.float64).eval()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # the fast one knows no float64
    found = 0.0
    for prompt, text in texts:
        near, true = (wanted(model, text)[prompt - 1 : -1].double() for model in (theirs, exact))
        found = max(found, float((near - true).abs().max()) / max(1.0, float(true.abs().max())))
    return found


def written(config: Any, kind: Any, directory: Path) -> None:
    """Save a small model that `kind`, a class of transformers, makes of the configuration. Weights are random and large enough that answers vary; also those that models
    begin with at a fixed value (norms, biases), so that none of them can be left out unnoticed."""
    with parameters_on_meta():
        size = sum(p.numel() for p in kind.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"its smallest configuration that could be guessed has {size:,} parameters")
    torch.manual_seed(1)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, torch.nn.Embedding):
                    # Small, or a model whose head is tied to it says the last token again.
                    parameter.normal_(std=0.05)
                elif parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif parameter.std() < 0.18:
                    parameter.add_(torch.randn_like(parameter), alpha=0.18)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name.endswith("bias"):
                    buffer.add_(torch.randn_like(buffer), alpha=0.1)
    model.save_pretrained(directory)


def rewritten(captured: Graph, longest: int) -> tuple[Graph, Literal["cached", "recomputed"], str]:
    """The graph, rewritten for serving as `prepare_serving` does, whether it is cached, and if not the reason."""
    try:
        return serving_graph(captured, cache="kv", maximum_sequence=longest), "cached", ""
    except UnsupportedModel as why:
        return serving_graph(captured, cache="recompute"), "recomputed", line(why)


def wanted(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits (length, vocabulary) of transformers over the whole sequence, with the positions that `generate()` says where a
    model takes them."""
    takes = inspect.signature(model.forward).parameters
    positions = {"position_ids": torch.arange(ids.shape[1])[None]} if "position_ids" in takes else {}
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, **positions, use_cache=False).logits
    if found.shape != (1, ids.shape[1], found.shape[-1]):
        raise ValueError(
            f"its logits have shape {tuple(found.shape)}: it is no language model of one sequence"
        )
    return found[0]


def compared(
    theirs: Any, ours: LanguageModel, graph: Graph, served: Literal["cached", "recomputed"]
) -> tuple[float, int, str, list[tuple[int, torch.Tensor]]]:
    """The largest error over all prompts, how much the longest answer varies, the first wrong answer, and each prompt's length
    and text."""
    cuts = sorted(random.Random(0).sample(range(1, len(graph.nodes)), 2))
    stages = [TorchDecodingStage(s, ours.read(s.graph.variables)) for s in split(graph, cuts)]
    draw = torch.Generator().manual_seed(2)
    worst, most, differs = 0.0, 0, ""
    texts = []
    vocabulary = min(ours.about.vocabulary, VOCABULARY)
    for length in PROMPTS:
        prompt = torch.randint(3, vocabulary, (1, length), generator=draw)
        answer, logits = generated(theirs, prompt, NEW[served])
        found = decoded(stages, prompt, answer, served)
        texts.append((length, torch.cat([prompt, torch.tensor([answer])], 1)))
        largest = max(1.0, float(logits.abs().max()))
        worst = max(worst, float((found - logits).abs().max()) / largest)
        chosen = found.argmax(-1).tolist()
        # Where transformers' own cache makes another answer than its logits, ours is that of the logits.
        if chosen != answer and chosen != logits.argmax(-1).tolist() and not differs:
            at = next(i for i, (a, b) in enumerate(zip(chosen, answer, strict=True)) if a != b)
            differs = f"token {at + 1} after {length} is {chosen[at]}, that of generate() {answer[at]}"
        most = max(most, len(set(answer)))
    return worst, most, differs, texts


def generated(model: Any, prompt: torch.Tensor, new: int) -> tuple[list[int], torch.Tensor]:
    """The answer of `generate()`, and the logits (new, vocabulary) after the prompt and each of its tokens but the last."""
    with torch.inference_mode():
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    start = prompt.shape[1]
    # From each beginning by itself: a model need not say the same of a position when more positions follow.
    logits = [wanted(model, whole[:, :end])[-1] for end in range(start, whole.shape[1])]
    return whole[0, start:].tolist(), torch.stack(logits)


def decoded(
    stages: list[TorchDecodingStage], prompt: torch.Tensor, answer: list[int], served: str
) -> torch.Tensor:
    """The logits (new, vocabulary) of the stages, which get the tokens of `answer` one after the other."""
    for stage in stages:
        stage.close("s")
        stage.open("s", POSITIONS)
    whole = torch.cat([prompt, torch.tensor([answer])], 1)
    found = []
    start = 0
    for end in range(prompt.shape[1], whole.shape[1]):
        if served == "recomputed":
            start = 0
        while start < end:
            stop = min(end, start + PIECE) if served == "cached" else end
            logits = run(stages, start, whole[:, start:stop])
            start = stop
        found.append(logits)
    return torch.stack(found)


def run(stages: list[TorchDecodingStage], start: int, tokens: torch.Tensor) -> torch.Tensor:
    values = {"input_ids": tokens, "position_ids": torch.arange(start, start + tokens.shape[1])[None]}
    for stage in stages:
        values.update(*stage.run([Piece("s", start, values)]))
    return values["result/0"][0, -1]


def line(error: BaseException) -> str:
    """The first line of the message that is not empty."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
