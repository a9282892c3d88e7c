"""Images in chat completions and rows in completions, over HTTP: counted, cached by content, refused by field."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch
from server_world import PATIENCE_S, Live, cached, chunks, serving
from tiny_llava import IMAGE_ID, IMAGE_TOKENS, make_tiny_llava, make_tiny_processor, picture

from anaphora.api.build import build_engine
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.server import image_fetches
from anaphora.server.config import ServerConfig

BLOCK = 16


def png(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(png(seed)), "detail": "auto"}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def make_engine() -> Engine:
    torch.set_num_threads(1)
    return build_engine(
        EngineConfig(make_tiny_llava(), tokenizer=make_tiny_processor(), num_blocks=128, max_images=2, num_threads=1)
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(make_engine()) as running:
        yield running


@pytest.fixture(autouse=True)
def _reset(live: Live) -> None:
    live.reset()


def chat(live: Live, *parts: dict[str, Any], status: int = 200, **body: Any) -> Any:
    values = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": True}
    return live.post(
        "/v1/chat/completions", status, **(values | body), messages=[{"role": "user", "content": list(parts)}]
    )


def test_an_image_is_read_counted_and_cached_by_its_content(live: Live) -> None:
    first = chat(live, text("Look: "), image(1), text("What is it?"))
    num_prompt = len("<user>Look: What is it?<assistant>") + IMAGE_TOKENS
    assert first["usage"]["prompt_tokens"] == num_prompt
    assert first["prompt_token_ids"].count(IMAGE_ID) == IMAGE_TOKENS
    assert cached(first) == 0
    again = chat(live, text("Look: "), image(1), text("What is it?"))
    assert cached(again) == (num_prompt - 1) // BLOCK * BLOCK
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    other = chat(live, text("Look: "), image(2), text("What is it?"))
    assert cached(other) == 0
    assert other["choices"][0]["logprobs"] != first["choices"][0]["logprobs"]
    assert live.engine._executor.features.num_encoded == 2
    assert live.engine._executor.features.num_held == 0


def test_a_stream_gives_what_a_reply_gives(live: Live) -> None:
    whole = chat(live, image(1), text("a"))
    messages = [{"role": "user", "content": [image(1), text("a")]}]
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "messages": messages}
    tokens = [t for c in chunks(live, "/v1/chat/completions", **body) for t in c["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]


def test_a_conversation_goes_on_behind_its_image(live: Live) -> None:
    first = chat(live, image(1), text("What is it?"))
    messages = [
        {"role": "user", "content": [image(1), text("What is it?")]},
        {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "Sure?"},
    ]
    more = live.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert cached(more) == (first["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK > IMAGE_TOKENS


def test_text_alone_is_rendered_as_with_images(live: Live) -> None:
    as_text = live.post("/tokenize", messages=[{"role": "user", "content": "abc"}])
    assert as_text["prompt"] == "<user>abc<assistant>"
    as_parts = live.post("/tokenize", messages=[{"role": "user", "content": [image(1), text("abc")]}])
    assert as_parts["prompt"] == "<user><image>abc<assistant>"
    assert as_parts["count"] == as_text["count"] + IMAGE_TOKENS


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([image(1), image(2), image(3)], "messages", "has 3 images, at most 2"),
        (
            [text("a"), {"type": "image_url", "image_url": {"url": url(b"no")}}],
            "messages[0].content[1].image_url.url",
            "no image",
        ),
        (
            [{"type": "image_url", "image_url": url(png(1)[:50])}],
            "messages[0].content[0].image_url",
            "broken or cut off",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}],
            "messages[0].content[0].image_url.url",
            "base64",
        ),
        (
            [{"type": "image_url", "image_url": {"url": url(png(1), "text/html")}}],
            "messages[0].content[0].image_url.url",
            "must begin with",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            "messages[0].content[0].image_url.url",
            "must be a data URL",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
            "messages[0].content[0].image_url.url",
            "must be a data URL",
        ),
        ([{"type": "image_url"}], "messages[0].content[0].image_url", "must be"),
        ([image(1), text("and <image>")], "messages", "1 images, 2 placeholders"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(live: Live, parts: Any, param: str, said: str) -> None:
    error = chat(live, *parts, status=400)["error"]
    assert error["param"] == param and said in error["message"]
    assert live.engine._executor.features.num_held == 0


def rows(seed: int, count: int) -> torch.Tensor:
    return torch.randn((count, 64), generator=torch.Generator().manual_seed(seed)) * 0.3


def file(**tensors: torch.Tensor) -> str:
    whole = {name: each.contiguous() for name, each in tensors.items()}
    return base64.b64encode(safetensors.torch.save(whole)).decode()


def complete(live: Live, status: int = 200, **body: Any) -> Any:
    return live.post("/v1/completions", status, **({"max_tokens": 3, "temperature": 0, "logprobs": 0} | body))


def test_images_that_do_not_come_hold_up_nobody_who_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    over, num_fetching = threading.Event(), 12
    waiting = threading.Semaphore(0)

    class Slow:
        def __init__(self, *_: Any) -> None: ...

        def fetch(self, image: Any) -> bytes:
            waiting.release()
            over.wait(PATIENCE_S)
            return png(1)

    monkeypatch.setattr(image_fetches, "RemoteImages", Slow)
    elsewhere = {"type": "image_url", "image_url": {"url": "https://a.test/1.png"}}
    with (
        serving(make_engine(), ServerConfig(allow_remote_images=True)) as other,
        ThreadPoolExecutor(num_fetching) as pool,
    ):
        slow = [pool.submit(chat, other, text("a"), elsewhere) for _ in range(num_fetching)]
        try:
            assert all(waiting.acquire(timeout=PATIENCE_S) for _ in range(num_fetching))  # all at once
            assert chat(other, text("a"))["usage"]["prompt_tokens"] > 0
            assert chat(other, text("a"), image(1))["usage"]["prompt_tokens"] > 0  # in the body: nothing to fetch
            assert not any(one.done() for one in slow)
        finally:
            over.set()
        replies = [one.result() for one in slow]
    assert len({reply["choices"][0]["message"]["content"] for reply in replies}) == 1


def test_rows_are_counted_and_cached_by_their_content(live: Live) -> None:
    first = complete(live, prompt_embeds=file(prompt_embeds=rows(1, 40)))
    assert first["usage"]["prompt_tokens"] == 40 and cached(first) == 0
    assert cached(complete(live, prompt_embeds=file(prompt_embeds=rows(1, 40)))) == 32
    changed = rows(1, 40)
    changed[20] += 1
    both = complete(live, prompt_embeds=[file(prompt_embeds=changed), file(prompt_embeds=rows(2, 3))])
    assert both["usage"]["prompt_tokens"] == 43 and cached(both) == 16
    assert len(both["choices"]) == 2


def test_tokens_may_stand_among_rows(live: Live) -> None:
    mask = torch.tensor([True] * 2 + [False] * 18)
    given = file(prompt_embeds=rows(1, 2), prompt_token_ids=torch.arange(20), embeds_mask=mask)
    assert complete(live, prompt_embeds=given)["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt_embeds": "%"}, "prompt_embeds", "in base64"),
        ({"prompt_embeds": 7}, "prompt_embeds", "in base64"),
        ({"prompt_embeds": []}, "prompt_embeds", "0 prompts"),
        ({"prompt_embeds": base64.b64encode(b"\x80\x04]").decode()}, "prompt_embeds", "a pickle is not taken"),
        ({"prompt_embeds": file(other=rows(1, 2))}, "prompt_embeds", "a tensor of that name"),
        ({"prompt_embeds": file(prompt_embeds=rows(1, 2)[:, :5])}, "prompt_embeds", "shape [rows, 64]"),
        ({"prompt_embeds": file(prompt_embeds=rows(1, 2)), "prompt": "a"}, "prompt_embeds", "prompt or prompt_embeds"),
        ({"prompt_embeds": file(prompt_embeds=rows(1, 2)), "echo": True}, "echo", "leave echo out"),
        ({"prompt_embeds": file(prompt_embeds=rows(1, 2)), "repetition_penalty": 2.0}, "repetition_penalty", "counts"),
    ],
)
def test_what_are_no_rows_is_refused_by_its_field(live: Live, body: Any, param: str, said: str) -> None:
    error = complete(live, 400, **body)["error"]
    assert error["param"] == param and said in error["message"]
