"""A client of another maker than OpenAI's own: `pydantic-ai`, whole, streamed, with tools and with a schema."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from server_world import CHAT_TEMPLATE, Live, serving
from tiny_tokenizer import make_tiny_tokenizer

CALL = {"type": "regex", "regex": r'<tool_call>\{"name": "tide", "arguments": \{"where": "A"\}\}</tool_call>'}
WORDS = {"type": "regex", "regex": "The tide is (high|low)\\."}


class Tide(BaseModel):
    level: Literal["high", "low"]


@pytest.fixture(scope="module")
def calling(make_engine: Any) -> Iterator[Live]:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<call>", "<tool_call>")
    with serving(make_engine(tokenizer=tokenizer)) as live:
        yield live


def make_model(live: Live) -> OpenAIChatModel:
    return OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=live.url + "/v1", api_key="none"))


def settings(response_format: Any = None) -> Any:
    body = {} if response_format is None else {"response_format": response_format}
    return {"seed": 1, "max_tokens": 200, "extra_body": body}


def make_agent(live: Live) -> Agent[None, str]:
    """The tiny model knows no tools: a regular expression makes it call one until it has an answer, and then talk."""

    def by_turn(context: RunContext[None]) -> Any:
        return settings(WORDS if len(context.messages) > 1 else CALL)

    agent = Agent(make_model(live), model_settings=by_turn)

    @agent.tool_plain
    def tide(where: str) -> str:
        """The tide at a place."""
        return f"high at {where}"

    return agent


def calls_of(messages: Any) -> list[tuple[str, Any]]:
    parts = [part for message in messages for part in message.parts]
    return [(part.tool_name, part.args_as_dict()) for part in parts if part.part_kind == "tool-call"]


def test_a_tool_is_called_and_its_answer_is_sent_back(calling: Live) -> None:
    result = make_agent(calling).run_sync("Tide at A?")
    assert calls_of(result.all_messages()) == [("tide", {"where": "A"})]
    assert result.output in ("The tide is high.", "The tide is low.")
    assert result.usage.requests == 2
    assert result.usage.cache_read_tokens > 0  # the second turn found the first one


def test_the_same_streamed(calling: Live) -> None:
    async def main() -> tuple[str, Any]:
        async with make_agent(calling).run_stream("Tide at A?") as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), calls_of(result.all_messages())

    text, calls = asyncio.run(main())
    assert text in ("The tide is high.", "The tide is low.")
    assert calls == [("tide", {"where": "A"})]


def test_a_schema_comes_back_as_its_model(calling: Live) -> None:
    agent = Agent(make_model(calling), output_type=NativeOutput(Tide), model_settings=settings())
    assert agent.run_sync("Tide at A?").output.level in ("high", "low")
