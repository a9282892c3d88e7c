"""Tool calls in what a model wrote: found whole, in pieces, and left alone where they are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_world import CHAT_TEMPLATE, Live, chunks, serving
from tiny_tokenizer import make_tiny_tokenizer

from anaphora.server.connection import event
from anaphora.server.tool_calls import ToolCallReader

TIDE = '<tool_call>\n{"name": "tide", "arguments": {"where": "A"}}\n</tool_call>'
MARKED = r'<tool_call>{"name": "echo", "arguments": {"a": "b \"</tool_call>\\</tool_call><tool_call>"}}</tool_call>'
UNENDED = '<tool_call>{"name": "tide}</tool_call>'
BROKEN = '<tool_call>{"name": "tide, "arguments": {}}</tool_call>'
TEXTS = {
    "": ("", []),
    "no call": ("no call", []),
    TIDE: ("", ["tide"]),
    f"Let me see.{TIDE}\n{TIDE}": ("Let me see.", ["tide", "tide"]),
    "a < b <tool": ("a < b <tool", []),
    "<tool_call>no json</tool_call>!": ("<tool_call>no json</tool_call>!", []),
    '<tool_call>{"name": 1}</tool_call>': ('<tool_call>{"name": 1}</tool_call>', []),
    '<tool_call>{"name": "x", "argu': ('<tool_call>{"name": "x", "argu', []),
    "</tool_call>": ("</tool_call>", []),
    f"{MARKED}.": (".", ["echo"]),
    f"{MARKED}{TIDE}": ("", ["echo", "tide"]),
    MARKED[:-1]: (MARKED[:-1], []),
    # A quote too many: text up to the first mark, and what comes after it is read as if nothing had been before.
    f"{BROKEN}\n{TIDE}": (f"{BROKEN}\n", ["tide"]),
    f"{BROKEN}{TIDE}": (BROKEN, ["tide"]),
    f"{BROKEN}{MARKED}": (BROKEN, ["echo"]),
    BROKEN: (BROKEN, []),
    UNENDED: (UNENDED, []),
    f"{UNENDED}{TIDE}": (UNENDED, ["tide"]),
    f"{UNENDED}{MARKED}{UNENDED}": (UNENDED + UNENDED, ["echo"]),
    f"{BROKEN}{BROKEN}": (f"{BROKEN}{BROKEN}", []),
    '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>': (
        '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>',
        [],
    ),
    '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        [],
    ),
}


@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_the_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader, shown, names = ToolCallReader(), [], []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        content, calls = reader.add(text[start:stop])
        shown.append(content)
        names += [call["function"]["name"] for call in calls]
    content, calls = reader.add("", is_last=True)
    shown.append(content)
    names += [call["function"]["name"] for call in calls]
    assert ("".join(shown), names) == TEXTS[text]
    assert [call["function"]["name"] for call in reader.calls] == names
    assert len({call["id"] for call in reader.calls}) == len(names)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"text": "a </tool_call> b"}', {"text": "a </tool_call> b"}),
        (r'{"text": "\ud83d"}', {"text": "\ud83d"}),
        (r'{"text": "\ud83d\ude00 \u2028"}', {"text": "\U0001f600 \u2028"}),
    ],
)
def test_arguments_are_what_the_model_wrote_and_can_be_sent(written: str, arguments: dict[str, str]) -> None:
    """Half a surrogate pair is no text that UTF-8 holds, so it goes out as the escape that it came as."""
    reader = ToolCallReader()
    assert reader.add(f'<tool_call>{{"name": "echo", "arguments": {written}}}</tool_call>', is_last=True)[0] == ""
    sent = json.loads(event(reader.calls[0]).removeprefix(b"data: "))
    assert json.loads(sent["function"]["arguments"]) == arguments


@pytest.fixture(scope="module")
def calling(make_engine: Any) -> Iterator[Live]:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<call>", "<tool_call>")
    with serving(make_engine(tokenizer=tokenizer)) as live:
        yield live


TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tide?"}],
    "tools": TOOLS,
    "seed": 1,
    # The tiny model knows no tools: this makes it write a call.
    "response_format": {
        "type": "regex",
        "regex": r'Wait\.<tool_call>\{"name": "tide", "arguments": \{"where": "[AB]"\}\}</tool_call>',
    },
}


def test_a_call_comes_back_as_a_tool_call(calling: Live) -> None:
    (choice,) = calling.post("/v1/chat/completions", **BODY)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Wait.")
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "tide")
    assert json.loads(call["function"]["arguments"])["where"] in "AB"
    (plain,) = calling.post("/v1/chat/completions", **BODY, tool_choice="none")["choices"]
    assert plain["message"]["content"].startswith("Wait.<tool_call>")
    assert (plain["finish_reason"], "tool_calls" in plain["message"]) == ("stop", False)


def test_a_streamed_call_is_the_same(calling: Live) -> None:
    (whole,) = calling.post("/v1/chat/completions", **BODY)["choices"]
    choices = [chunk["choices"][0] for chunk in chunks(calling, "/v1/chat/completions", **BODY)]
    assert "".join(choice["delta"]["content"] for choice in choices) == "Wait."
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert (call["index"], call["function"]) == (0, whole["message"]["tool_calls"][0]["function"])
    assert choices[-1]["finish_reason"] == "tool_calls"
