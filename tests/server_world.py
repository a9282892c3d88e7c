"""A real server on 127.0.0.1 in a thread of the test process, over the tiny Llama and a tokenizer of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from tiny_llama import VOCAB_SIZE

from anaphora.engine.engine import Engine
from anaphora.server.app import build_app
from anaphora.server.config import ServerConfig
from anaphora.server.run import Server, bind

BOS, END = "<s>", "<end>"

PATIENCE_S = 120.0
"""Before what does not come is given up: as much as a loaded machine may need, as no claim is about it."""

CHAT_TEMPLATE = (
    "<s>{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}<call>{{ call['function'] | tojson }}{% endfor %}"
    "{% if message.get('reasoning_content') %}<think>{{ message['reasoning_content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    """One token a byte (ids 0 to 255), `<s>` is 256 and comes before raw text, ids above decode to `(id)`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate(alphabet)}
    vocab |= {BOS: 256} | {f"({index})": index for index in range(257, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, chat_template=CHAT_TEMPLATE)


@dataclass
class Live:
    """A running server and a client for it."""

    url: str
    engine: Engine
    app: Any
    server: Server
    client: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE_S)

    def post(self, path: str, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
        reply = self.client.post(path, json=body, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    def generate(self, prompt: Any, max_tokens: int = 8, **body: Any) -> Any:
        """A greedy completion."""
        values = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        return self.post("/v1/completions", **(values | body))

    def hit(self, prompt: Any, **body: Any) -> int:
        return cached(self.generate(prompt, **({"max_tokens": 1} | body)))

    def reset(self) -> None:
        assert self.post("/reset_prefix_cache") == {"reset": True}

    def metrics(self) -> dict[str, float]:
        """Sample with its labels -> value."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("anaphora:"): float(value) for name, value in pairs}

    def live_blocks(self) -> float:
        return self.metrics()['kv_blocks{state="live"}']


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def chunks(live: Live, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    with live.client.stream("POST", path, json={"stream": True, **body}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


@contextlib.contextmanager
def serving(engine: Engine, config: ServerConfig | None = None, **options: Any) -> Iterator[Live]:
    config = config or ServerConfig()
    app = build_app(engine, config, **({"model_name": "tiny", "max_num_seqs": 64} | options))
    ready = threading.Event()
    server = Server(app, dataclasses.replace(config, drain_timeout_s=5), on_ready=ready.set)
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    live = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, app, server)
    try:
        yield live
    finally:
        live.client.close()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
