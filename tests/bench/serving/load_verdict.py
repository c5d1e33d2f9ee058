"""Judges a load test: rows and a verdict from its figures. Pure."""

from __future__ import annotations

from typing import Any

FREED_SECONDS, GROWTH, FAIR_SHARE = 2.0, 1.10, 0.5

Row = tuple[str, str, str, str, str]  # what, baseline, swarm, ratio, target


def faults(found: dict[str, Any]) -> list[str]:
    """The failed requirements, in words."""
    told = []
    for each in found.get("steady", ()):
        told += [f"{each['clients']} clients: {fault}" for fault in _answer_faults(each)]
        if each["resident_growth"] > GROWTH:
            told.append(f"{each['clients']} clients: memory grew to {each['resident_growth']:.2f} times")
    if vanish := found.get("vanish"):
        if vanish["started"] < vanish["clients"] or not vanish["sessions"]:
            told.append(f"vanish: {vanish['started']} of {vanish['clients']} answers had begun")
        if vanish["freed_seconds"] > FREED_SECONDS:
            told.append(f"vanish: stages were free after {vanish['freed_seconds']:.1f} s")
    if memory := found.get("memory"):
        told += [f"memory: {fault}" for fault in _answer_faults(memory)]
        if memory["answers"] < memory["clients"]:
            told.append(f"memory: {memory['answers']} of {memory['clients']} answers came")
    if abuse := found.get("abuse"):
        told += [f"abuse: {fault}" for fault in _answer_faults(abuse)]
        if abuse["share"] < FAIR_SHARE:
            told.append(f"abuse: the honest client had {abuse['share']:.2f} of its pace")
    return told


def _answer_faults(each: dict[str, Any]) -> list[str]:
    told = []
    if each["error_count"]:
        told.append(f"{each['error_count']} errors, such as {each['errors'][0]}")
    if each["wrong"]:
        told.append(f"{each['wrong']} answers had other tokens")
    if each["busy_without_retry"]:
        told.append(f"{each['busy_without_retry']} times 429 without Retry-After")
    if each["freed_seconds"] == float("inf"):
        told.append("sessions stayed when nobody asked any more")
    if not each["answers"]:
        told.append("no answer at all")
    return told


def held(found: dict[str, Any]) -> bool:
    return not faults(found)


def load_rows(found: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for each in found.get("steady", ()):
        what = f"{each['clients']} clients for {each['seconds']:.0f} s"
        rows += [
            (f"{what}: tokens/s", "", f"{each['tokens_per_second']:.0f}", "", ""),
            ("  answers; 429; other errors; with other tokens", "", _counts(each), "", "0 errors, 0 others"),
            ("  to the first token, p50 / p95: ms", "", _times(each, "first"), "", ""),
            ("  between tokens, p50 / p95: ms", "", _times(each, "between"), "", ""),
            (
                "  memory of the larger peer at rest after one half and after both: MiB",
                *(f"{max(each['resident_bytes'][when]) / 2**20:.0f}" for when in ("half", "end")),
                f"{each['resident_growth']:.2f}", f"<= {GROWTH}",
            ),
        ]  # fmt: skip
    if vanish := found.get("vanish"):
        what = f"{vanish['started']} clients vanish in their answers: s until every stage is free"
        rows.append((what, "", f"{vanish['freed_seconds']:.2f}", "", f"<= {FREED_SECONDS}"))
    if memory := found.get("memory"):
        what = f"{memory['clients']} long answers in too little memory: answers; 429; errors; others"
        rows.append((what, "", _counts(memory), "", f"{memory['clients']}; any; 0; 0"))
        rows.append(("  longest pause: s", "", f"{memory['longest_pause']:.2f}", "", ""))
    if abuse := found.get("abuse"):
        what = f"tokens/s of one client alone, and beside one with {abuse['streams']} answers that it does not read"
        rows.append(
            (what, f"{abuse['honest_alone']:.0f}", f"{abuse['honest_beside']:.0f}", f"{abuse['share']:.2f}", f">= {FAIR_SHARE}")
        )  # fmt: skip
    rows += [("does not hold", fault, "", "", "") for fault in faults(found)]
    return rows


def _counts(each: dict[str, Any]) -> str:
    return f"{each['answers']}; {each['busy']}; {each['error_count']}; {each['wrong']}"


def _times(each: dict[str, Any], name: str) -> str:
    p50, p95 = each[f"{name}_p50"], each[f"{name}_p95"]
    return "" if p50 is None else f"{1e3 * p50:.0f} / {1e3 * p95:.0f}"
