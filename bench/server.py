"""What HTTP costs over the engine, and what a server carries.

    OMP_WAIT_POLICY=PASSIVE python bench/server.py [--model smollm2-135m] [--threads 2] [--requests 32] [--json]

Overhead: one client, one request after the other; what the client waits, less what the engine itself was busy
(adding, planning, executing, committing, detokenising). From requests of 1 and of 65 tokens follow the cost of a
request and, streamed, of a token. The client's own work is in it.

Throughput: 1, 8 and 32 clients, each one request after the other, 256 tokens of prompt and 32 of output, with 224 of
the prompt shared by all, or none. The server runs in this process, the clients in another. Medians.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from anaphora.api.build import build_engine
from anaphora.config import EngineConfig
from anaphora.engine.engine import Engine
from anaphora.server.app import build_app
from anaphora.server.config import ServerConfig
from anaphora.server.run import Server, bind

SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 224, 32, 32
LONG_OUTPUT = 65


@contextmanager
def serving(engine: Engine) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    ready = threading.Event()
    config = ServerConfig(drain_timeout_s=5)
    app = build_app(engine, config, model_name="bench", max_num_seqs=64)
    server, listener = Server(app, config, on_ready=ready.set), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask_all(port: int, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds of each request, one after the other on one connection. Runs in the clients' process."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds = []
    for body in bodies:
        data = json.dumps(body)
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        seconds.append(time.perf_counter() - begin)
        if reply.status != 200 or b'"error":' in text:
            raise SystemExit(f"{reply.status}: {text[:300]!r}")
    return seconds


def ask_at_once(port: int, each: list[list[dict[str, Any]]]) -> float:
    """Seconds until every client has had all its replies. Runs in the clients' process."""
    with ThreadPoolExecutor(len(each)) as pool:
        begin = time.perf_counter()
        list(pool.map(ask_all, itertools.repeat(port), each))
        return time.perf_counter() - begin


class Bench:
    def __init__(self, engine: Engine, port: int, clients: ProcessPoolExecutor) -> None:
        self.engine, self.port, self.clients = engine, port, clients
        self._seeds = itertools.count()

    def body(self, shared: list[int], num_own: int, max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
        prompt = shared + self.tokens(num_own)
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}

    def tokens(self, count: int) -> list[int]:
        draw = random.Random(next(self._seeds))
        return [draw.randrange(self.engine.vocab_size // 4, self.engine.vocab_size // 2) for _ in range(count)]

    def engine_s(self) -> float:
        times = self.engine.stats().times
        return times.add_s + times.schedule_s + times.execute_s + times.update_s + times.output_s

    def outside_s(self, max_tokens: int, count: int, *, stream: bool) -> float:
        """Median seconds of a request outside the engine."""
        outside = []
        for _ in range(count):
            before = self.engine_s()
            (waited,) = self.clients.submit(
                ask_all, self.port, [self.body([], OWN_TOKENS, max_tokens, stream=stream)]
            ).result()
            outside.append(waited - (self.engine_s() - before))
        return statistics.median(outside)

    def overhead(self, count: int) -> dict[str, float]:
        result = {}
        for name, stream in (("whole", False), ("stream", True)):
            short, long = (self.outside_s(n, count, stream=stream) for n in (1, LONG_OUTPUT))
            result[f"{name}_request_ms"] = 1e3 * short
            result[f"{name}_token_us"] = 1e6 * (long - short) / (LONG_OUTPUT - 1)
        return result

    def throughput(self, num_clients: int, num_requests: int, *, is_shared: bool) -> dict[str, Any]:
        shared = self.tokens(SHARED_TOKENS) if is_shared else []
        num_own = OWN_TOKENS if is_shared else OWN_TOKENS + SHARED_TOKENS
        num_each = max(1, num_requests // num_clients)
        each = [[self.body(shared, num_own, NEW_TOKENS) for _ in range(num_each)] for _ in range(num_clients)]
        before = self.engine.stats().counters
        seconds = self.clients.submit(ask_at_once, self.port, each).result()
        counters = self.engine.stats().counters.delta(before)
        return {
            "clients": num_clients,
            "shared_prefix": is_shared,
            "requests_per_s": num_clients * num_each / seconds,
            "output_tokens_per_s": counters.num_generated_tokens / seconds,
            "hit_rate": counters.hit_rate,
        }


def markdown(result: dict[str, Any]) -> str:
    lines = ["| outside the engine | whole reply | stream |", "| --- | --: | --: |"]
    cost = result["overhead"]
    lines.append(f"| a request, ms | {cost['whole_request_ms']:.2f} | {cost['stream_request_ms']:.2f} |")
    lines.append(f"| a token more, µs | {cost['whole_token_us']:.0f} | {cost['stream_token_us']:.0f} |")
    lines += ["", "| clients | prefix | requests/s | output tokens/s | hit rate |", "| --: | --- | --: | --: | --: |"]
    for row in result["throughput"]:
        prefix = f"{SHARED_TOKENS} shared" if row["shared_prefix"] else "none shared"
        speed = f"{row['requests_per_s']:.2f} | {row['output_tokens_per_s']:.0f}"
        lines.append(f"| {row['clients']} | {prefix} | {speed} | {row['hit_rate']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="of each row; at least one for each client")
    parser.add_argument("--json", action="store_true", help="JSON only")
    options = parser.parse_args()
    engine = build_engine(EngineConfig(model=options.model, num_blocks=2048, num_threads=options.threads))
    spawn = multiprocessing.get_context("spawn")
    with serving(engine) as port, ProcessPoolExecutor(1, mp_context=spawn) as clients:
        bench = Bench(engine, port, clients)
        bench.throughput(8, 8, is_shared=False)  # compiles, touches the pool
        result = {
            "model": options.model,
            "threads": options.threads,
            "overhead": bench.overhead(options.requests),
            "throughput": [
                bench.throughput(num_clients, options.requests, is_shared=is_shared)
                for num_clients in (1, 8, 32)
                for is_shared in (False, True)
            ],
        }
    print(json.dumps(result, indent=None if options.json else 2))
    if not options.json:
        print(f"\n{markdown(result)}")


if __name__ == "__main__":
    main()
