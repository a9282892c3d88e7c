"""Tool calls in what a model wrote, found as the text arrives. Knows text only.

One format: `<tool_call>{"name": "...", "arguments": {...}}</tool_call>`, that of Hermes, Qwen 2.5 and 3, and SmolLM3. A
model writes it if its chat template does. What looks like a call and is none stays text, to the letter.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def reads_template(chat_template: object) -> bool:
    """Whether a model with this chat template writes calls in this format."""
    return OPEN in str(chat_template or "")


class ToolCallReader:
    """One output. calls: found so far, in OpenAI's shape."""

    __slots__ = ("_after_call", "_held", "_inside", "_num_seen", "calls")

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._num_seen = 0  # characters of what is held inside a call whose end marks are parts of strings
        self._after_call = False  # the white space between calls is no content
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certainly none of a call, and the calls that this piece completes.

        is_last: nothing comes after it, and nothing is held back any more: a call without its end is none.
        """
        self._held += text
        shown: list[str] = []
        found: list[dict[str, Any]] = []
        while self._take_call(shown, found, is_last) if self._inside else self._enter(shown):
            pass
        if not self._inside:
            keep = 0 if is_last else _overlap(self._held)
            shown.append(self._visible(self._held[: len(self._held) - keep]))
            self._held = self._held[len(self._held) - keep :]
        elif is_last:
            shown.append(OPEN + self._held)
            self._held, self._inside = "", False
        self.calls += found
        return "".join(shown), found

    def _enter(self, shown: list[str]) -> bool:
        before, mark, after = self._held.partition(OPEN)
        if not mark:
            return False
        shown.append(self._visible(before))
        self._held, self._inside, self._num_seen = after, True, 0
        return True

    def _take_call(self, shown: list[str], found: list[dict[str, Any]], is_last: bool) -> bool:
        """Leave a call that is whole, or that cannot become one: then it is text up to the first end mark."""
        while (end := self._held.find(CLOSE, self._num_seen)) >= 0:
            try:
                call = _parse(self._held[:end])
            except _InsideStringError:  # the mark is part of an argument
                self._num_seen = end + len(CLOSE)
                continue
            if call is None:
                break
            found.append(call)
            self._after_call = True
            self._leave(end)
            return True
        if end < 0 and not is_last:
            return False
        end = self._held.find(CLOSE)
        if end < 0:
            return False
        shown.append(OPEN + self._held[:end] + CLOSE)
        self._after_call = False
        self._leave(end)
        return True

    def _leave(self, end: int) -> None:
        self._held, self._inside = self._held[end + len(CLOSE) :], False

    def _visible(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


class _InsideStringError(Exception):
    """The text ends inside a string of JSON that is right so far."""


def _parse(text: str) -> dict[str, Any] | None:
    """The call, or None. Raises _InsideStringError."""
    try:
        call = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise _InsideStringError from None
        return None
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not _is_unicode(call["name"]):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    if not _is_unicode(written):  # half of a surrogate pair, which the model wrote as an escape
        written = json.dumps(arguments)
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call["name"], "arguments": written},
    }


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _overlap(text: str) -> int:
    """Length of the longest proper beginning of OPEN that the text ends with."""
    return next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:n])), 0)
