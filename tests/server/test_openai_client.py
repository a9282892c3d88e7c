"""The real `openai` client against the live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_world import PATIENCE_S, Live
from tiny_llama import ids

MESSAGES: Any = [{"role": "system", "content": "z" * 50}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.completion_tokens == 6
    content = whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_completions_and_fields_of_ours(client: openai.OpenAI) -> None:
    body: Any = {"model": "tiny", "prompt": ids(1, 20), "max_tokens": 3, "temperature": 0}
    first = client.completions.create(**body, extra_body={"cache_salt": "s", "return_token_ids": True})
    assert len(first.choices[0].token_ids) == 3  # type: ignore[attr-defined]
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
    assert text == first.choices[0].text


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_models(client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert listed.id == "tiny"
    assert client.models.retrieve("tiny") == listed
    for name in ("other", "org/tiny", "tiny/"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve(name)
        assert missing.value.code == "model_not_found"


def test_the_asynchronous_client_many_at_once(live: Live) -> None:
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            body: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
            replies = await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(12)))
            return [reply.choices[0].message.content for reply in replies]

    assert len(set(asyncio.run(main()))) == 1
