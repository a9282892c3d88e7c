"""Any OpenAI-compatible server as a target: streamed `/v1/completions`, with what the server was found to take.

Knows the protocol and the metric names of well-known servers; must not import an engine. A client sees pieces of text:
where a piece holds several tokens, gaps between tokens are means.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from anaphora.bench import prometheus
from anaphora.bench.http_client import Connection, RefusedError, Server
from anaphora.bench.measurement import BenchRequest, Sample
from anaphora.bench.prompts import as_text
from anaphora.errors import BenchError

_RESETS = ("/reset_prefix_cache", "/flush_cache")
"""Anaphora and vLLM (in its development mode); SGLang."""

_OPTIONAL: Mapping[str, Any] = {
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "cache_salt": "probe",
    "return_timings": True,
}
"""Fields beyond the oldest API -> a value to try them with."""


@dataclass(slots=True)
class _Reply:
    """What the events of one stream said."""

    pieces_s: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    timings: Mapping[str, Any] | None = None

    def add(self, now_s: float, event: Mapping[str, Any]) -> None:
        if isinstance(event.get("error"), dict):
            raise RefusedError(500, str(event["error"].get("message")))
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            # A last event without text stands for a token only where no other did: half a character is held back.
            if choice.get("text") or (choice.get("finish_reason") and not self.pieces_s):
                self.pieces_s.append(now_s)
                break
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings


class HttpTarget:
    """`open` asks the server what it is and what it takes; before that it is a name and an address.

    pool_tokens: for servers whose metrics do not say.
    """

    caching: bool | None = None

    def __init__(
        self,
        name: str,
        server: Server,
        *,
        model: str | None = None,
        pool_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.pool_tokens = pool_tokens
        self._server = server
        self._model = model
        self._clock = clock
        self._takes: frozenset[str] = frozenset()
        self._takes_ids = False
        self._connections: list[Connection] = [Connection(server)]
        self._reset_path: str | None = None
        self._max_model_len: int | None = None
        self._version: Any = None

    @property
    def has_salt(self) -> bool:
        return "cache_salt" in self._takes

    def open(self, token_ids: Sequence[int]) -> None:
        """Find out. token_ids: a few valid ones. Raises BenchError where it answers no completion at all."""
        self._find_model()
        base = {"max_tokens": 2, "temperature": 0, "stream": True}
        try:
            self._stream(self._connections[0], {**base, "prompt": "Once upon a time"})
        except RefusedError as error:
            raise BenchError(f"{self._server.url} completes no text ({error}): does it speak OpenAI's API?") from error
        self._takes_ids = self._accepts({**base, "prompt": list(token_ids)})
        self._takes = frozenset(
            name for name, value in _OPTIONAL.items() if self._accepts({**base, "prompt": "Once", name: value})
        )
        for path in _RESETS:
            if self._get("POST", path) is not None:
                self._reset_path = path
                break
        version = self._get("GET", "/version")
        self._version = None if version is None else _json_or_text(version)
        self.pool_tokens = prometheus.pool_tokens(self._metrics()) or self.pool_tokens

    def begin(self, pool_tokens: int) -> None:
        """A server stays as it was started."""

    def reset(self) -> bool:
        return self._reset_path is not None and self._get("POST", self._reset_path) is not None

    def run(self, requests: Sequence[BenchRequest]) -> tuple[float, list[Sample]]:
        """One connection and one thread a request. Raises BenchError."""
        while len(self._connections) < len(requests):
            self._connections.append(Connection(self._server))
        used = self._connections[: len(requests)]
        for connection in used:
            connection.open()
        if len(requests) == 1:
            begin_s = self._clock()
            sample = self._one(used[0], requests[0], lambda: begin_s)
            return sample.e2e_s, [sample]
        start = _Start(len(requests), self._clock)
        with ThreadPoolExecutor(len(requests)) as threads:
            futures = [
                threads.submit(self._one, connection, request, start)
                for connection, request in zip(used, requests, strict=True)
            ]
            samples = [future.result() for future in futures]
        return max(sample.e2e_s for sample in samples), samples

    def counters(self) -> dict[str, int] | None:
        return prometheus.known_counters(self._metrics())

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "server",
            "url": self._server.url,
            "model": self._model,
            "version": self._version,
            "max_model_len": self._max_model_len,
            "pool_tokens": self.pool_tokens,
            "prompts": "token ids" if self._takes_ids else "text",
            "takes": sorted(self._takes),
            "can_reset": self._reset_path is not None,
        }

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _one(self, connection: Connection, request: BenchRequest, start: Callable[[], float]) -> Sample:
        body: dict[str, Any] = {
            "prompt": list(request.token_ids) if self._takes_ids else as_text(request.token_ids),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            **{name: value for name, value in _OPTIONAL.items() if name in self._takes and name != "cache_salt"},
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        begin_s = start()
        try:
            reply = self._stream(connection, body)
        except RefusedError as error:
            return Sample(len(request.token_ids), None, 0, 0.0, self._clock() - begin_s, error=str(error))
        end_s = self._clock() - begin_s
        if not reply.pieces_s:
            return Sample(len(request.token_ids), None, 0, 0.0, end_s, error="the answer held no text")
        pieces_s = [piece_s - begin_s for piece_s in reply.pieces_s]
        usage = reply.usage or {}
        prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Sample(
            prompt if isinstance(prompt, int) else len(request.token_ids),
            cached if isinstance(cached, int) else None,
            output if isinstance(output, int) else len(pieces_s),
            pieces_s[0],
            pieces_s[-1],
            tuple(later - earlier for earlier, later in pairwise(pieces_s)),
            _parts(reply.timings),
            is_reported=isinstance(prompt, int) and isinstance(output, int),
        )

    def _stream(self, connection: Connection, body: Mapping[str, Any]) -> _Reply:
        """Raises RefusedError, BenchError."""
        reply = _Reply()
        for now_s, event in connection.events(f"{self._server.api_path}/completions", {"model": self._model, **body}):
            reply.add(now_s, event)
        return reply

    # -- what the server is --------------------------------------------------------------------------------------------

    def _find_model(self) -> None:
        try:
            listed = json.loads(self._connections[0].call("GET", f"{self._server.api_path}/models"))
            first = listed["data"][0]
            found, length = first["id"], first.get("max_model_len")
        except (RefusedError, ValueError, LookupError, TypeError, AttributeError) as error:
            if self._model is None:
                raise BenchError(f"{self._server.url} lists no model ({error}): give --served-model") from error
            return
        self._model = self._model or found
        self._max_model_len = length if isinstance(length, int) else None

    def _accepts(self, body: Mapping[str, Any]) -> bool:
        try:
            self._stream(self._connections[0], body)
        except RefusedError:
            return False
        return True

    def _get(self, method: str, path: str) -> str | None:
        """None where the server has no such thing, or keeps it from us."""
        try:
            return self._connections[0].call(method, f"{self._server.root_path}{path}")
        except RefusedError:
            return None

    def _metrics(self) -> list[prometheus.MetricSample]:
        return prometheus.parse(self._get("GET", "/metrics") or "")


class _Start:
    """Called by each thread when it is ready: returns the one moment at which all of them go."""

    def __init__(self, parties: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s = 0.0
        self._barrier = threading.Barrier(parties, action=self._note)

    def __call__(self) -> float:
        self._barrier.wait()
        return self._begin_s

    def _note(self) -> None:
        self._begin_s = self._clock()


def _parts(timings: Mapping[str, Any] | None) -> dict[str, float]:
    """Anaphora's `timings`, in ms, of the time to the first token; others' mean something else."""
    parts = (timings or {}).get("ttft_parts_ms")
    if not isinstance(parts, dict):
        return {}
    return {name: value / 1e3 for name, value in parts.items() if isinstance(value, int | float)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text[:200]
