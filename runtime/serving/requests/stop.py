"""Stop strings, found across the boundaries of tokens. Pure; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Cuts a text, which arrives in pieces of any size, before the first of `stops` to end in it (of several that end together, the
    longest). Text that may be the beginning of one is held back.

    One pass, a step of Knuth, Morris and Pratt (1977) for each character and stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # length of the longest prefix of each that the text ends with
        self._held = ""
        self.found = False

    def push(self, piece: str, *, counts: bool = True) -> str:
        """The text that has become certain; "" once one is `found`. `counts` False: a match must not end in this piece, but may begin
        in it."""
        if not self._stops:
            return piece
        start = len(self._held)
        text = self._held + piece
        for place in range(start, 0 if self.found else len(text)):
            self._step(text[place])
            ended = [
                len(stop)
                for stop, matched in zip(self._stops, self._matched, strict=True)
                if matched == len(stop)
            ]
            if ended and not counts:
                self._begin_again()
            elif ended:
                self.found, self._held = True, ""
                return text[: place + 1 - max(ended)]
        if self.found:
            return ""
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """At the end of the text: what was held back."""
        held, self._held = self._held, ""
        return held

    def _begin_again(self) -> None:
        """Go on from a match that does not count: its own end may begin another."""
        for each, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            if self._matched[each] == len(stop):
                self._matched[each] = borders[-1]

    def _step(self, character: str) -> None:
        for each, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[each]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            self._matched[each] = matched + (stop[matched] == character)


def _borders(text: str) -> list[int]:
    """The failure function of Knuth, Morris and Pratt: for each prefix of `text`, its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        length += text[place] == text[length]
        borders[place] = length
    return borders
