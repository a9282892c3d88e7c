"""The life of one generating request: a place in the queue, the body, tokens, the engine, the reply; and every way out.

Knows the engine's groups and connections; what a reply looks like is the endpoint's. However a request ends (finished,
refused, client gone, deadline, shutdown), its place and its blocks are given back.

    place -> body -> prepare -> submit -> accepted -> stream or collect
      429     413      400                   400          504, 500
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Scope, Send

from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.outputs import RequestOutput, StepOutput
from anaphora.engine.request_group import NewRequest, RequestGroup
from anaphora.engine.ttft import TtftParts
from anaphora.errors import AnaphoraError, EngineStoppedError
from anaphora.server.access_log import log_request
from anaphora.server.arrival import Arrival
from anaphora.server.config import ServerConfig
from anaphora.server.connection import HEARTBEAT, ClientGoneError, Connection, event
from anaphora.server.errors import ApiError, as_api_error, invalid
from anaphora.server.metrics import Metrics
from anaphora.server.tenants import Caller

_logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long a client may take to receive an error."""


class Job(ABC):
    """One parsed and tokenised request: what to run, and how to say what came of it."""

    requests: Sequence[NewRequest]
    stream: bool
    prompt_field: str
    names: Mapping[str, str]
    count_field: str = "n"  # which field asks for many outputs

    @abstractmethod
    def reply(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole reply."""

    async def send_reply(self, connection: Connection, outputs: Sequence[RequestOutput]) -> None:
        await connection.send_json(200, self.reply(outputs))

    def first_events(self) -> Iterable[bytes]:
        """What a stream says before anything is generated."""
        return ()

    @abstractmethod
    def step_events(self, index: int, step: StepOutput) -> Iterable[bytes]:
        """What a stream says when request `index` gained something."""

    @abstractmethod
    def last_events(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]:
        """What a stream says when all have finished; the end mark comes after."""

    def error_events(self, error: ApiError) -> Iterable[bytes]:
        """What a stream says when it ends early."""
        return (event(error.body),)

    end_mark: bytes = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Places:
    """How many requests may be in the house: those that run and those that wait."""

    limit: int
    taken: int = 0

    def take(self, count: int = 1) -> None:
        """Raises ApiError: 429 if there is no room now."""
        if self.taken + count > self.limit:
            message = f"{self.taken} requests run or wait, as many as this server takes ({self.limit}); try again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self.taken += count

    def give_back(self, count: int) -> None:
        self.taken -= count


Prepare = Callable[[bytes, Arrival], Awaitable[Job]]
Authenticate = Callable[[Scope], Caller]


@dataclass(slots=True)
class GenerationEndpoint:
    """An ASGI application: one URL that generates. prepare: a body to a job; raises ApiError."""

    name: str
    prepare: Prepare
    authenticate: Authenticate
    engine: AsyncEngine
    config: ServerConfig
    metrics: Metrics
    places: Places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send)
        exchange = _Exchange(self, connection)
        outcome = "error"
        try:
            outcome = await exchange.run()
        except ClientGoneError:
            outcome = "disconnect"
        except ApiError as error:
            outcome = {429: "rejected", 504: "timeout"}.get(error.status, "error" if error.status >= 500 else "refused")
            await exchange.send_error(error)
        except asyncio.CancelledError:  # the server shuts down and does not wait longer
            outcome = "shutdown"
            await exchange.send_error(ApiError(503, "the server is shutting down", code="shutdown"))
            raise
        except Exception as error:
            _logger.error("a request failed", exc_info=error)
            await exchange.send_error(ApiError(500, "internal error", code="internal_error"))
        finally:
            exchange.settle(outcome)


class _Exchange:
    """One request at one endpoint."""

    def __init__(self, endpoint: GenerationEndpoint, connection: Connection) -> None:
        self.outputs: list[RequestOutput | None] = []
        self.arrival: Arrival | None = None
        self._endpoint = endpoint
        self._connection = connection
        self._job: Job | None = None
        self._group: RequestGroup | None = None
        self._places_taken = 0
        self._token_s: dict[int, float] = {}  # when each request's last token came
        self._ttft_parts: dict[int, TtftParts] = {}
        self._is_settled = False

    async def run(self) -> str:
        """The outcome. Raises ApiError, ClientGoneError."""
        endpoint = self._endpoint
        caller = endpoint.authenticate(self._connection.scope)
        self.arrival = Arrival(caller, endpoint.engine.engine.clock)
        if not endpoint.engine.is_running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        self._take_places(1)
        try:
            async with asyncio.timeout(endpoint.config.request_timeout_s):
                body = await self._connection.body(endpoint.config.max_body_bytes)
                self.arrival.received()
                await self._until_gone(self._answer(body, self.arrival))
        except TimeoutError:
            seconds = endpoint.config.request_timeout_s
            raise ApiError(504, f"the request took longer than {seconds:g} s", code="request_timeout") from None
        return "finished"

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._endpoint.places.give_back(self._places_taken)
        self._places_taken = 0

    def settle(self, outcome: str) -> None:
        """Give back what it had and count it, the first time that it is called.

        A reply's last words and this are one turn of the loop: whoever has read them finds them counted, and the place
        free for the next request.
        """
        if self._is_settled:
            return
        self._is_settled = True
        self.close()
        endpoint, outputs = self._endpoint, self.finished_outputs
        endpoint.metrics.finished(endpoint.name, outcome, outputs)
        tenant = self.arrival.caller.tenant if self.arrival else None
        log_request(endpoint.name, outcome, tenant, len(self.outputs), outputs)

    async def send_error(self, error: ApiError) -> None:
        """The last words. A client that does not read them holds nothing: what it had is given back first."""
        self.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                if not self._connection.has_begun:
                    await self._connection.send_json(error.status, error.body, error.headers)
                elif self._job is not None and self._job.stream:
                    await self._connection.send_events(self._job.error_events(error))
                    await self._connection.end_stream(self._job.end_mark)

    def _take_places(self, count: int) -> None:
        self._endpoint.places.take(count)
        self._places_taken += count

    async def _until_gone(self, work: Awaitable[None]) -> None:
        """Do the work, and stop it when the client goes away. Raises ClientGoneError."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._connection.gone())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGoneError
            working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _answer(self, body: bytes, arrival: Arrival) -> None:
        engine = self._endpoint.engine
        self._job = job = await self._endpoint.prepare(body, arrival)
        if len(job.requests) > self._endpoint.places.limit:
            message = (
                f"the request asks for {len(job.requests)} outputs, this server takes {self._endpoint.places.limit}"
            )
            raise invalid(job.count_field, message)
        self._take_places(len(job.requests) - 1)
        self.outputs = [None] * len(job.requests)
        self._group = engine.submit(job.requests, arrival_s=arrival.arrival_s, before=arrival.parts)
        try:
            await self._group.accepted()
        except AnaphoraError as error:
            raise as_api_error(error, prompt=job.prompt_field, names=job.names) from None
        if job.stream:
            await self._stream(job, self._group, arrival)
        else:
            while batch := await self._receive(self._group):
                self._note(batch, arrival)
            await job.send_reply(self._connection, self.finished_outputs)
        self.settle("finished")

    async def _stream(self, job: Job, group: RequestGroup, arrival: Arrival) -> None:
        connection = self._connection
        await connection.begin_stream()
        await connection.send_events(job.first_events())
        while True:
            try:
                async with asyncio.timeout(self._endpoint.config.heartbeat_s):
                    batch = await self._receive(group)
            except TimeoutError:
                await connection.send_events([HEARTBEAT])
                continue
            if not batch:
                break
            steps = self._note(batch, arrival)
            await connection.send_events(data for index, step in steps for data in job.step_events(index, step))
        await connection.send_events(job.last_events(self.finished_outputs))
        await connection.end_stream(job.end_mark)

    async def _receive(self, group: RequestGroup) -> list[tuple[int, StepOutput]]:
        try:
            return await group.receive()
        except EngineStoppedError as error:
            raise as_api_error(error, prompt="") from None

    def _note(self, batch: Sequence[tuple[int, StepOutput]], arrival: Arrival) -> list[tuple[int, StepOutput]]:
        """Keep what finished, time what arrived: until now, not until the step ended. The same, with those times.

        Raises ApiError if one of the requests failed.
        """
        metrics, now_s = self._endpoint.metrics, self._endpoint.engine.engine.clock()
        steps = []
        for index, step in batch:
            if step.ttft_parts is not None:
                self._ttft_parts[index] = parts = step.ttft_parts.until(now_s - arrival.arrival_s)
                metrics.first_token(parts)
            elif step.token_ids:
                metrics.next_token(now_s - self._token_s[index])
            self._token_s[index] = now_s
            if step.output is not None:
                output = self._as_delivered(index, step.output, now_s - arrival.arrival_s)
                self.outputs[index] = output
                if output.error is not None:
                    _logger.error("a request failed in the engine: %s", output.error)  # may tell of others in its step
                    raise ApiError(500, "the model failed on this request", code="generation_failed")
                step = replace(step, output=output)
            steps.append((index, step))
        return steps

    def _as_delivered(self, index: int, output: RequestOutput, e2e_s: float) -> RequestOutput:
        parts = self._ttft_parts.get(index)
        ttft_s = None if parts is None else parts.total_s
        return replace(output, metrics=replace(output.metrics, e2e_s=e2e_s, ttft_s=ttft_s, ttft_parts=parts))

    @property
    def finished_outputs(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output is not None]
