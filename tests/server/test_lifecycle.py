"""Every way out of a request: the client leaves, time is up, the house is full, the server drains, the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from server_world import PATIENCE_S, Live, cached, serving
from tiny_llama import ids

from anaphora.server.app import build_app
from anaphora.server.config import ServerConfig

pytestmark = pytest.mark.timing


SOON_S = 5.0
"""A small part of what the requests of these tests would take to their ends."""


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
    """Seconds until it held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "it never came true"
        time.sleep(0.005)
    return time.monotonic() - start


def connect(live: Live, path: str = "/v1/completions", **body: Any) -> socket.socket:
    """Send a request on a socket of its own and read nothing."""
    host, port = live.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def leave_by_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def leave_by_half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


LEAVE = [socket.socket.close, leave_by_reset, leave_by_half_close]
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 4000}


def is_idle(live: Live) -> bool:
    metrics = live.metrics()
    names = ('kv_blocks{state="live"}', "num_requests_running", "num_requests_waiting")
    return all(metrics[name] == 0 for name in names)


@contextlib.contextmanager
def slowed(live: Live, seconds: float) -> Iterator[None]:
    """Each step of the engine takes so much longer."""
    executor: Any = live.engine._executor
    execute = executor.execute
    executor.execute = lambda plan: (time.sleep(seconds), execute(plan))[1]
    try:
        yield
    finally:
        executor.execute = execute


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_while_it_runs_frees_its_blocks(
    live: Live, leave: Callable[[socket.socket], None], stream: bool, path: str
) -> None:
    is_chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": ids(1, 40)}
    with slowed(live, 0.005):
        connection = connect(live, path, stream=stream, **prompt, **ENDLESS)
        until(lambda: live.metrics()["num_requests_running"] == 1)
        if stream:
            connection.recv(1)  # between tokens
        leave(connection)
        assert until(lambda: is_idle(live)) < SOON_S
        connection.close()
    assert len(live.generate([8, 9], 3)["choices"][0]["token_ids"]) == 3


@pytest.mark.parametrize("leave", LEAVE)
def test_a_client_that_leaves_while_it_waits_leaves_the_queue(
    make_engine: Any, leave: Callable[[socket.socket], None]
) -> None:
    with serving(make_engine(max_num_seqs=1), max_num_seqs=1) as live, slowed(live, 0.005):
        first = connect(live, prompt=ids(1, 40), **ENDLESS)
        until(lambda: live.metrics()["num_requests_running"] == 1)
        second = connect(live, prompt=ids(2, 40), stream=True, **ENDLESS)
        until(lambda: live.metrics()["num_requests_waiting"] == 1)
        leave(second)
        assert until(lambda: live.metrics()["num_requests_waiting"] == 0) < SOON_S
        assert live.metrics()["num_requests_running"] == 1
        first.close()
        until(lambda: is_idle(live))
        second.close()


def test_a_client_that_leaves_before_its_first_token(make_engine: Any) -> None:
    with serving(make_engine(max_num_batched_tokens=16)) as live, slowed(live, 0.1):
        connection = connect(live, prompt=ids(1, 2000), stream=True, **ENDLESS)  # 125 steps to the first token
        until(lambda: live.live_blocks() > 2)
        connection.close()
        assert until(lambda: is_idle(live)) < SOON_S
        assert live.metrics()["generation_tokens_total"] == 0


def test_an_aborted_stream_of_four_choices_leaves_nothing(live: Live) -> None:
    body = {"prompt": ids(2400, 40), "max_tokens": 2000, "temperature": 1, "n": 4, "stream": True}
    with slowed(live, 0.005), live.client.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        indices = {json.loads(next(lines)[6:])["choices"][0]["index"] for _ in range(8)}
    assert indices == {0, 1, 2, 3}
    assert until(lambda: is_idle(live)) < SOON_S


def test_time_is_up(make_engine: Any) -> None:
    with serving(make_engine(), ServerConfig(request_timeout_s=0.5)) as live, slowed(live, 0.005):
        error = live.post("/v1/completions", 504, prompt=[8], **ENDLESS)["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
        until(lambda: is_idle(live), SOON_S)
        with live.client.stream("POST", "/v1/completions", json={"prompt": [8], "stream": True, **ENDLESS}) as reply:
            assert reply.status_code == 200
            *_, last, done = [line for line in reply.iter_lines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert done == "data: [DONE]"
        until(lambda: is_idle(live), SOON_S)
        assert live.metrics()['http_requests_total{endpoint="completions",outcome="timeout"}'] == 2


def test_a_client_that_reads_nothing_holds_nothing_when_its_time_is_up(make_engine: Any) -> None:
    engine = make_engine()
    app = build_app(engine, ServerConfig(request_timeout_s=1.0), model_name="tiny", max_num_seqs=4)
    body = json.dumps({"prompt": ids(1, 40), "stream": True, **ENDLESS}).encode()
    requests = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if not requests:
            await asyncio.sleep(PATIENCE_S)
        return requests.pop()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(PATIENCE_S)  # the socket's buffer is full

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

    async def main() -> None:
        async with app.router.lifespan_context(app):
            exchange = asyncio.ensure_future(app(scope, receive, send))
            async with asyncio.timeout(PATIENCE_S):
                for number in (1, 0):
                    while engine.num_unfinished != number:
                        await asyncio.sleep(0.005)
            await asyncio.wait_for(exchange, SOON_S)

    asyncio.run(main())


def test_a_body_that_never_comes_is_given_up(make_engine: Any) -> None:
    with serving(make_engine(), ServerConfig(request_timeout_s=0.3, max_queue=0), max_num_seqs=1) as live:
        host, port = live.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 504")
        assert len(live.generate([8, 9], 3)["choices"][0]["token_ids"]) == 3  # the only place is free again


def test_a_full_house_answers_429_and_takes_the_next_when_one_leaves(make_engine: Any) -> None:
    with serving(make_engine(max_num_seqs=1), ServerConfig(max_queue=1), max_num_seqs=1) as live, slowed(live, 0.005):
        taken = [connect(live, prompt=ids(i, 40), **ENDLESS) for i in range(2)]
        until(lambda: live.metrics()["num_requests_waiting"] == 1)
        reply = live.client.post("/v1/completions", json={"prompt": [8]})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("rate_limit_error", "queue_full")
        assert live.client.get("/health").status_code == 200
        taken[1].close()
        until(lambda: live.metrics()["num_requests_waiting"] == 0)
        taken[0].close()
        until(lambda: is_idle(live))
        assert len(live.generate([8, 9], 3)["choices"][0]["token_ids"]) == 3


def test_no_piece_of_a_reply_waits_for_the_acknowledgement_of_the_one_before(live: Live) -> None:
    assert live.client.get("/health").status_code == 200
    (connection, *_) = live.server.server_state.connections
    sent_by: socket.socket = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
    assert sent_by.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_stream_that_waits_sends_comments(make_engine: Any) -> None:
    config = ServerConfig(heartbeat_s=0.05)
    with serving(make_engine(max_num_seqs=1), config, max_num_seqs=1) as live, slowed(live, 0.005):
        first = connect(live, prompt=ids(1, 40), **ENDLESS)
        until(lambda: live.metrics()["num_requests_running"] == 1)
        body = {"prompt": [8, 9], "max_tokens": 2, "stream": True}
        with live.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith(":")
            first.close()
            data = [line for line in lines if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"


def test_health_answers_while_a_long_prompt_is_read_and_tokenised(make_engine: Any) -> None:
    """Noise only adds to the longest wait: the least of up to three runs."""
    # Refused by its length, by its tokens, by its number of ids, and as too many things.
    prompts: list[Any] = ["x" * 5_000_000, "word " * 100_000, [8] * 1_500_000, [[8]] * 800_000]
    bodies = [json.dumps({"prompt": prompt}) for prompt in prompts]  # here: client and server share one interpreter
    del prompts
    gc.collect()
    gc.freeze()  # as `anaphora serve` does
    with serving(make_engine(max_model_len=4096, num_blocks=300)) as live:
        assert any(longest_health_s(live, bodies) < 0.5 for _ in range(3))
    gc.unfreeze()


def longest_health_s(live: Live, bodies: list[str]) -> float:
    replies: list[httpx2.Response] = []

    def ask() -> None:
        with httpx2.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            replies.extend(client.post("/v1/completions", content=body) for body in bodies)

    thread = threading.Thread(target=ask)
    thread.start()
    worst = 0.0
    while thread.is_alive():
        begin = time.monotonic()
        assert live.client.get("/health").status_code == 200
        worst = max(worst, time.monotonic() - begin)
        time.sleep(0.02)
    codes = [reply.json()["error"]["code"] for reply in replies]
    assert codes == ["context_length_exceeded"] * 3 + ["invalid_value"]
    return worst


# -- reset and the end -------------------------------------------------------------------------------------------------


def test_a_reset_tells_the_truth(live: Live) -> None:
    live.reset()
    prompt = ids(2600, 85)
    live.generate(prompt, 1)
    assert live.hit(prompt) == 80
    before = live.metrics()["prefix_cache_hits_total"]
    live.reset()
    assert live.metrics()["prefix_cache_hits_total"] == before
    assert live.hit(prompt) == 0
    assert live.hit(prompt) == 80


def test_a_reset_while_a_request_runs_is_refused_or_makes_it_compute_anew(live: Live) -> None:
    live.reset()
    prompt = ids(2600, 85)
    long = prompt + ids(2601, 40)
    solo = live.generate(long, 60)["choices"][0]["token_ids"]
    replies: list[Any] = []

    def run() -> None:
        client = httpx2.Client(base_url=live.url, timeout=PATIENCE_S)
        body = {"prompt": long, "max_tokens": 60, "temperature": 0, "return_token_ids": True}
        replies.append(client.post("/v1/completions", json=body).json())
        client.close()

    with slowed(live, 0.02):
        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: live.metrics()["num_requests_running"] == 1)
        refused = live.post("/reset_prefix_cache", 409)
        assert (refused["reset"], refused["error"]["code"]) == (False, "cache_in_use")
        assert live.hit(prompt) == 80
        # This request still runs when the cache is forgotten.
        assert live.post("/reset_prefix_cache", preempt_running=True) == {"reset": True}
        assert live.hit(ids(1, 20)) == 0
        thread.join(PATIENCE_S)
    assert replies[0]["choices"][0]["token_ids"] == solo
    assert live.live_blocks() == 0


def test_resets_amid_mixed_requests_change_no_answer(live: Live) -> None:
    prompts = [ids(i % 5, 30 + i) for i in range(20)]
    expected = [live.generate(prompt, 6)["choices"][0]["token_ids"] for prompt in prompts]
    got: dict[int, Any] = {}

    def run(index: int) -> None:
        client = httpx2.Client(base_url=live.url, timeout=PATIENCE_S)
        body = {"prompt": prompts[index], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        got[index] = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        client.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(20)]
    for index, thread in enumerate(threads):
        thread.start()
        live.client.post("/reset_prefix_cache", json={"preempt_running": index % 2 == 0})
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [got[index] for index in range(20)] == expected
    until(lambda: is_idle(live), SOON_S)


def test_a_dead_engine_fails_what_runs_and_health(make_engine: Any) -> None:
    with serving(make_engine()) as live:
        live.engine.step = lambda: {}["what another sent"]  # type: ignore[assignment, method-assign]
        error = live.post("/v1/completions", 503, prompt=[8])["error"]
        assert error["code"] == "engine_stopped"
        assert "another" not in error["message"]
        assert live.client.get("/health").status_code == 503
        assert live.post("/v1/completions", 503, prompt=[8])["error"]["code"] == "engine_stopped"
        assert live.post("/reset_prefix_cache", 503)["error"]["code"] == "engine_stopped"


def test_a_failed_step_costs_its_requests_only(make_engine: Any) -> None:
    with serving(make_engine()) as live:
        executor: Any = live.engine._executor
        execute, executor.execute = executor.execute, lambda plan: {}["what another sent"]
        error = live.post("/v1/completions", 500, prompt=[8])["error"]
        assert error["code"] == "generation_failed"
        assert "another" not in error["message"]
        executor.execute = execute
        assert cached(live.generate([8, 9], 3)) == 0
        assert is_idle(live)


def test_requests_that_do_not_fit_together_take_turns(make_engine: Any) -> None:
    with serving(make_engine(num_blocks=32)) as live:
        got: list[int] = []

        def run(index: int) -> None:
            with httpx2.Client(base_url=live.url, timeout=PATIENCE_S) as client:
                body = {"prompt": ids(index, 300), "max_tokens": 20, "temperature": 0}
                got.append(client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

        threads = [threading.Thread(target=run, args=(index,)) for index in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert got == [20] * 10
        assert is_idle(live)


def test_a_request_that_can_never_fit_keeps_nobody_waiting(make_engine: Any) -> None:
    with serving(make_engine(num_blocks=32)) as live, slowed(live, 0.005):
        first = connect(live, prompt=ids(1, 40), **ENDLESS)
        until(lambda: live.metrics()["num_requests_running"] == 1)
        begin = time.monotonic()
        error = live.post("/v1/completions", 400, prompt=ids(2, 1000))["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert time.monotonic() - begin < SOON_S
        assert len(live.generate(ids(3, 20), 4)["choices"][0]["token_ids"]) == 4
        first.close()


def test_an_idle_connection_is_closed_when_its_time_is_up_and_not_before(make_engine: Any) -> None:
    """A proxy that keeps connections longer than the server sends requests into closed ones (uvicorn's own 5 s)."""
    assert ServerConfig().keep_alive_timeout_s > 60  # what nginx and the clouds' balancers keep theirs for
    idle = ServerConfig(keep_alive_timeout_s=1)
    with (
        serving(make_engine(), idle) as live,
        contextlib.closing(connect(live, max_tokens=1, prompt=[1])) as connection,
    ):
        answer = b""
        while b"\r\n\r\n{" not in answer or not answer.endswith(b"}"):
            answer += connection.recv(65536)
        begin_s = time.monotonic()
        assert answer.startswith(b"HTTP/1.1 200")
        assert connection.recv(65536) == b""
        assert 0.5 < time.monotonic() - begin_s < 9
