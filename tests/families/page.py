"""docs/models.md from the outcomes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from families.encoder_decoders import READS
from families.trial import SEES, TIMES_ROUNDING, TOLERANCE, Outcome

HOW = {
    "cached": "KV cache", "recomputed": "recomputed", "refused": "refused", "wrong": "WRONG", "not tried": "not tried",
}  # fmt: skip


def text(outcomes: Sequence[Outcome], version: str, untried: Sequence[str] = ()) -> str:
    rows, reading, seeing = list[str](), list[str](), list[str]()
    for o in outcomes:
        if o.served != "not tried":
            name = o.family.removesuffix(READS).removesuffix(SEES)
            apart = ", not batched" if o.served == "cached" and not o.together else ""
            row = f"| {name} | {HOW[o.served]}{apart} | {_error(o)} | {_cell(o.why)} |"
            (reading if o.family.endswith(READS) else seeing if o.family.endswith(SEES) else rows).append(row)
    pairs = [o for o in outcomes if o.family.endswith(READS)]
    seen = [o for o in outcomes if o.family.endswith(SEES)]
    alone = [o for o in outcomes if not o.family.endswith((READS, SEES))]
    missing = [f"| {o.family} | {_cell(o.why)} |" for o in outcomes if o.served == "not tried"]
    return "\n".join([
        "# Models",
        "",
        f"Every text family of transformers {version}, and how a directory of it is served. `make models` writes this page: for",
        "each family a tiny model with random weights is saved, opened as a user's directory is, cut into three stages, decoded",
        "greedily after prompts of 1, 7 and 50 tokens, and held against `generate()` and against the logits of the whole",
        "sequence. **KV cache**: a token runs one position. **Recomputed**: each token computes the whole sequence anew, which is",
        "exact for any model that can be captured. **Refused**: `serve` says why, in the line shown, and serves nothing. The",
        "error is that of the worst logit, as a share of the largest logit where that exceeds 1. All are computed in float32, and",
        f"an error above {TOLERANCE:.0e} counts as wrong, but where the model's own float32 is that far from its float64: there the",
        f"error may be {TIMES_ROUNDING} times that difference, which stands beside it. Every token has to be that of `generate()`, or the one of",
        "the largest logit of the model's own. Answers to several users run as one batch; **not batched**: one after another.",
        "",
        counts(alone),
        "",
        "| family | served | worst logit error | why not with a KV cache |",
        "|---|---|---|---|",
        *rows,
        "",
        *([
            "## Encoder-decoders",
            "",
            "The same for families that read a source, a text of 1, 7, 32, 50 and 100 tokens or sound: the encoder runs once, then a token runs",
            "one position. What has no KV cache is refused.",
            "",
            counts(pairs),
            "",
            "| family | served | worst logit error | why not |",
            "|---|---|---|---|",
            *reading,
            "",
        ] if pairs else []),
        *([
            "## Models of images and texts",
            "",
            "Of these, texts alone are served, as of a language model.",
            "",
            counts(seen),
            "",
            "| family | served | worst logit error | why not with a KV cache |",
            "|---|---|---|---|",
            *seeing,
            "",
        ] if seen else []),
        *([f"Still to be tried (`make models` goes on with them): {', '.join(untried)}.", ""] if untried else []),
        "## Not tried",
        "",
        "For these no tiny configuration could be made that transformers itself runs as a language model of one sequence.",
        "",
        "| family | why |",
        "|---|---|",
        *missing,
        "",
    ])  # fmt: skip


def counts(outcomes: Sequence[Outcome]) -> str:
    found = Counter(o.served for o in outcomes)
    tried = len(outcomes) - found["not tried"]
    exact = found["cached"] + found["recomputed"]
    share = f"{exact / tried:.0%}" if tried else "none"
    return (
        f"{tried} families tried, {exact} served exactly ({share}): {found['cached']} with a KV cache, {found['recomputed']} "
        f"recomputed; {found['refused']} refused, {found['wrong']} wrong; {found['not tried']} not tried."
    )


def short(outcome: Mapping[str, Any]) -> str:
    found = Outcome(**outcome)
    return f"{found.family:24} {HOW[found.served]:10} {_error(found):8} {found.tokens:3} {found.why}"


def _error(outcome: Outcome) -> str:
    if outcome.error is None:
        return ""
    own = "" if outcome.rounding is None else f" (own float32: {outcome.rounding:.0e})"
    return f"{outcome.error:.0e}{own}"


def _cell(why: str) -> str:
    return why.replace("|", "\\|").removeprefix("no KV cache for this model: ")
