"""The verbs of the scenarios over HTTP: a live server on model M that answers as `LLM` does. See subject.py."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server_world import Live, make_tokenizer, serving
from subject import BLOCK_SIZE, tiny_llama

from anaphora import SamplingParams
from anaphora.api.build import build_engine
from anaphora.config import EngineConfig
from anaphora.core.stats import Counters, Gauges, Stats
from anaphora.engine.outputs import CompletionOutput, Logprob, RequestOutput, StepOutput
from anaphora.errors import PromptTooLongError

_COUNTERS = {
    "num_queried_tokens": "prefix_cache_queries_total",
    "num_hit_tokens": "prefix_cache_hits_total",
    "num_computed_prompt_tokens": "prompt_tokens_computed_total",
    "num_generated_tokens": "generation_tokens_total",
    "num_preemptions": "num_preemptions_total",
    "num_evicted_blocks": "evicted_blocks_total",
    "num_steps": "engine_steps_total",
}


class HttpLLM:
    """What the scenarios use of `LLM`, by requests to a server. Everything comes from replies and from /metrics."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def generate(
        self, prompts: Sequence[Any], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """One prompt or several; several are sent at once, so they arrive in any order."""
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        if len(prompts) == 1:
            return [self._ask(prompts[0], each[0])]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._ask, prompts, each))

    def stream(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[StepOutput]:
        """The pieces as they come; the last one brings the whole. Closing the generator closes the connection."""
        body = _body(prompt, sampling) | {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[dict[str, Any]] = []
        held: StepOutput | None = None
        with self.live.client.stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if held is not None:
                    yield held
                    held = None
                for choice in chunk["choices"]:
                    pieces.append(choice)
                    held = StepOutput("", choice["text"], tuple(choice["token_ids"]), index=choice["index"])
                if chunk["usage"]:
                    whole = _output({"choices": _joined(pieces, sampling.n), "usage": chunk["usage"]}, prompt)
                    yield StepOutput("", "", (), index=pieces[-1]["index"], output=whole)

    def reset_prefix_cache(self) -> bool:
        return bool(self.live.client.post("/reset_prefix_cache").json()["reset"])

    def stats(self) -> Stats:
        """Counters that /metrics does not show stay 0."""
        metrics = self.live.metrics()
        counters = Counters(**{field: int(metrics[name]) for field, name in _COUNTERS.items()})
        live, cached, free = (int(metrics[f'kv_blocks{{state="{state}"}}']) for state in ("live", "cached", "free"))
        following = int(metrics["num_requests_following"])
        waiting = int(metrics["num_requests_waiting"]) - following
        running = int(metrics["num_requests_running"])
        return Stats(counters, Gauges(live + cached + free, live, cached, free, running, waiting, following))

    def _ask(self, prompt: Sequence[int], sampling: SamplingParams) -> RequestOutput:
        reply = self.live.client.post("/v1/completions", json=_body(prompt, sampling))
        if reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded":
            raise PromptTooLongError(reply.json()["error"]["message"])
        assert reply.status_code == 200, reply.text
        return _output(reply.json(), prompt)


@contextlib.contextmanager
def start_http(num_blocks: int = 256, **options: Any) -> Iterator[HttpLLM]:
    """START: a fresh server process's worth of engine, in this process."""
    values = {"block_size": BLOCK_SIZE, "dtype": "float32", "num_threads": 1} | options
    config = EngineConfig(model=tiny_llama(), tokenizer=make_tokenizer(), num_blocks=num_blocks, **values)
    with serving(build_engine(config)) as live:
        yield HttpLLM(live)


@contextlib.contextmanager
def slowed(llm: HttpLLM, seconds: float) -> Iterator[None]:
    """Each step of the engine takes so much longer."""
    executor: Any = llm.live.engine._executor
    execute = executor.execute
    executor.execute = lambda plan: (time.sleep(seconds), execute(plan))[1]
    try:
        yield
    finally:
        executor.execute = execute


def settled(llm: Any, timeout_s: float = 1.0) -> Stats:
    """The statistics once nothing is held any more, or after the time a server has to notice a leaving client."""
    deadline = time.monotonic() + timeout_s
    while (stats := llm.stats()).gauges.num_live_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    return stats  # type: ignore[no-any-return]


def _body(prompt: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed", "n", "logprobs", "prompt_logprobs")
    body = {name: getattr(sampling, name) for name in names}
    return {**body, "prompt": list(prompt), "return_token_ids": True, "return_tokens_as_token_ids": True}


def _output(reply: dict[str, Any], prompt: Sequence[int]) -> RequestOutput:
    usage = reply["usage"]
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    scored = choices[0].get("prompt_logprobs")
    return RequestOutput(
        request_id="",
        prompt=None,
        prompt_token_ids=list(prompt),
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        outputs=[_completion(choice) for choice in choices],
        finished=True,
        metrics=None,  # type: ignore[arg-type]  # times are no part of a scenario
        prompt_logprobs=None if scored is None else [_scores(entry) for entry in scored],
    )


def _completion(choice: dict[str, Any]) -> CompletionOutput:
    """OpenAI's shape names no ranks: they are 0 here."""
    logprobs = None
    if choice["logprobs"] is not None:
        tops, chosen = choice["logprobs"]["top_logprobs"], choice["logprobs"]["token_logprobs"]
        logprobs = [
            {token: Logprob(own, 0)}
            | {int(name.removeprefix("token_id:")): Logprob(value, 0) for name, value in top.items()}
            for token, own, top in zip(choice["token_ids"], chosen, tops, strict=True)
        ]
    return CompletionOutput(choice["index"], choice["text"], choice["token_ids"], logprobs, choice["finish_reason"])


def _scores(entry: dict[str, Any] | None) -> dict[int, Logprob] | None:
    return entry and {int(token): Logprob(one["logprob"], one["rank"]) for token, one in entry.items()}


def _joined(pieces: Sequence[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """A stream's choices as an unstreamed reply has them."""
    choices = []
    for index in range(n):
        own = [piece for piece in pieces if piece["index"] == index]
        lists = {
            name: [value for piece in own for value in piece["logprobs"][name]]
            for name in ("token_logprobs", "top_logprobs")
        }
        ids = [token for piece in own for token in piece["token_ids"]]
        text = "".join(piece["text"] for piece in own)
        choices.append({**own[-1], "text": text, "token_ids": ids, "logprobs": lists})
    return choices
