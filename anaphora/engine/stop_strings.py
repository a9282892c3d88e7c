"""Where a text ends because of a stop string. Knows strings only.

Text arrives in pieces of any size, and a stop string may begin in one and end in another. The first stop string to
*end* wins, and among those that end together the longest, as if the text came one character at a time: so the result
does not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on and holds back what may be the beginning of a stop string.

    matched: the stop string that was found, else None. Text after it is dropped.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str, *, may_end: bool = True) -> str:
        """The text that can be given out now. Call no more once `matched` is set.

        may_end: whether a stop string that ends in this text counts.
        """
        if not text:
            return ""
        known = len(self._held)
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, known - len(stop) + 1))) >= 0
        ]
        if found and may_end:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text still held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
