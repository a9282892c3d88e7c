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

    __slots__ = ("_after_call", "_held", "_inside", "calls")

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._after_call = False  # the white space between calls is no content
        self.calls: list[dict[str, Any]] = []

    def add(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certainly none of a call, and the calls that this piece completes."""
        self._held += text
        shown: list[str] = []
        found: list[dict[str, Any]] = []
        while True:
            before, mark, after = self._held.partition(CLOSE if self._inside else OPEN)
            if not mark:
                break
            self._held, self._inside = after, not self._inside
            if self._inside:
                shown.append(self._visible(before))
            elif (call := _parse(before)) is not None:
                found.append(call)
                self._after_call = True
            else:
                self._after_call = False
                shown.append(OPEN + before + CLOSE)
        if not self._inside:
            keep = _overlap(self._held)
            shown.append(self._visible(self._held[: len(self._held) - keep]))
            self._held = self._held[len(self._held) - keep :]
        self.calls += found
        return "".join(shown), found

    def flush(self) -> str:
        """The text still held back, at the end of the output: a call without its end is none."""
        rest = (OPEN if self._inside else "") + self._held
        self._held, self._inside = "", False
        return rest

    def _visible(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def _parse(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _overlap(text: str) -> int:
    """Length of the longest proper beginning of OPEN that the text ends with."""
    return next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:n])), 0)
