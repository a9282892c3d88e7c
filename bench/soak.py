"""A server under a bounded mixed load: does it keep anything, and is every answer the right one?

    python bench/soak.py [--minutes 3] [--clients 8] [--seed 1] [--json]

Two processes of `anaphora serve` on the tests' tiny Llama: one under load with a small pool, so that it evicts and
preempts; one without a cache, asked alone afterwards, as the reference. Each client draws, from its own seed: whole
replies, streams, choices, salts, chats, scoring, streams that it leaves, connections that it closes unread, prompts
that can never fit, wrong bodies, resets. Checked:

    blocks      live blocks are 0 within a second of the last request; live + cached + free are the pool
    counters    none ever falls; hits never exceed queries
    memory      the resident memory of the last quarter is at most 10 % above that of the second
    answers     every finished greedy answer is the reference's, near-ties apart (at most 1 in 200)
    statuses    nothing is answered with a 5xx

Ends with 1 if one of them does not hold. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from server_world import make_tokenizer
from tiny_llama import ids, make_tiny_llama

NEAR_TIE = 1e-4
NUM_BLOCKS = 96
COUNTED = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_computed_total",
    "engine_steps_total",
)
STATES = [f'kv_blocks{{state="{state}"}}' for state in ("live", "cached", "free")]

STEMS = [ids(9000 + number, 40 + 61 * number % 700) for number in range(12)]
TAILS = [ids(9100 + number, 1 + 7 * number % 50) for number in range(12)]


class ServerProcess:
    """`anaphora serve` until the context ends."""

    def __init__(self, folder: str, *options: str) -> None:
        start = "import sys; from anaphora.cli.main import main; sys.exit(main())"
        common = ["serve", folder, "--port", "0", "--dtype", "float32", "--num-threads", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *common, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        self.url = ready.partition(" at ")[2].partition(",")[0]
        if not self.url:
            raise SystemExit("the server did not start")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def metrics(self, client: httpx2.Client) -> dict[str, float]:
        lines = client.get(self.url + "/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("anaphora:"): float(value) for name, value in pairs}


class Load:
    """Clients until the deadline. answers: what finished, by prompt and length."""

    def __init__(self, server: ServerProcess, deadline: float, seed: int) -> None:
        self.server, self.deadline, self.seed = server, deadline, seed
        self.answers: dict[tuple[tuple[int, ...], int], set[tuple[int, ...]]] = {}
        self.num_answers = 0
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        draw = random.Random(self.seed * 1000 + number)
        with httpx2.Client(base_url=self.server.url, timeout=120) as http:
            while time.monotonic() < self.deadline:
                kind = draw.choice(KINDS)
                try:
                    KINDS_BY_NAME[kind](self, http, draw)
                except Exception as error:
                    self.fault(f"{kind}: {type(error).__name__}: {error}")
                self.outcomes[kind] += 1

    def fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)

    def body(self, draw: random.Random) -> dict[str, Any]:
        prompt = draw.choice(STEMS) + draw.choice(TAILS)
        salt = draw.choice([None, None, "a", "b"])
        return {"prompt": prompt, "max_tokens": draw.choice([1, 8, 40]), "temperature": 0, "cache_salt": salt}

    def post(self, http: httpx2.Client, path: str, body: Any, *expected: int) -> Any:
        reply = http.post(path, json=body)
        if reply.status_code not in (expected or (200,)):
            self.fault(f"{path}: {reply.status_code} {reply.text[:200]}")
        return reply.json()

    def keep(self, body: dict[str, Any], token_ids: list[int]) -> None:
        with self._lock:
            self.num_answers += 1
            self.answers.setdefault((tuple(body["prompt"]), body["max_tokens"]), set()).add(tuple(token_ids))

    # -- what a client does --------------------------------------------------------------------------------------------

    def whole(self, http: httpx2.Client, draw: random.Random) -> None:
        body = self.body(draw) | {"return_token_ids": True, "n": draw.choice([1, 1, 1, 3])}
        for choice in self.post(http, "/v1/completions", body)["choices"]:
            self.keep(body, choice["token_ids"])

    def scored(self, http: httpx2.Client, draw: random.Random) -> None:
        body = self.body(draw) | {"return_token_ids": True, "prompt_logprobs": 1}
        (choice,) = self.post(http, "/v1/completions", body)["choices"]
        self.keep(body, choice["token_ids"])

    def stream(self, http: httpx2.Client, draw: random.Random, leave_after: int | None = None) -> None:
        body = self.body(draw) | {"return_token_ids": True, "stream": True}
        token_ids: list[int] = []
        with http.stream("POST", "/v1/completions", json=body) as reply:
            for number, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.fault(f"stream: {chunk}")
                    return
                token_ids += chunk["choices"][0]["token_ids"]
                if number == leave_after:
                    return
        self.keep(body, token_ids)

    def leaves(self, http: httpx2.Client, draw: random.Random) -> None:
        with httpx2.Client(base_url=self.server.url, timeout=120) as own:
            self.stream(own, draw, leave_after=draw.randrange(3))

    def closes_unread(self, http: httpx2.Client, draw: random.Random) -> None:
        with (
            contextlib.suppress(httpx2.TimeoutException),
            httpx2.Client(base_url=self.server.url, timeout=httpx2.Timeout(120, read=0.02)) as own,
        ):
            own.post("/v1/completions", json=self.body(draw) | {"max_tokens": 400})

    def chat(self, http: httpx2.Client, draw: random.Random) -> None:
        messages = [{"role": "user", "content": draw.choice("abc") * draw.randrange(1, 200)}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 1.0, "stream": draw.random() < 0.5}
        http.post("/v1/chat/completions", json=body).raise_for_status()

    def too_long(self, http: httpx2.Client, draw: random.Random) -> None:
        self.post(http, "/v1/completions", {"prompt": ids(1, 16 * NUM_BLOCKS + 1)}, 400)

    def wrong(self, http: httpx2.Client, draw: random.Random) -> None:
        self.post(http, "/v1/completions", {"prompt": [8], "nonsense": 1}, 400)

    def reset(self, http: httpx2.Client, draw: random.Random) -> None:
        self.post(http, "/reset_prefix_cache", {"preempt_running": draw.random() < 0.3}, 200, 409)


KINDS_BY_NAME = {
    "whole": Load.whole,
    "stream": Load.stream,
    "leaves": Load.leaves,
    "closes_unread": Load.closes_unread,
    "scored": Load.scored,
    "chat": Load.chat,
    "too_long": Load.too_long,
    "wrong": Load.wrong,
    "reset": Load.reset,
}
KINDS = (
    ["whole"] * 6 + ["stream"] * 4 + ["leaves"] * 3 + ["closes_unread", "scored", "chat", "too_long", "wrong", "reset"]
)


def watch(load: Load, every_s: float) -> Iterator[float]:
    """Resident megabytes of the server, and what its metrics must not do, until the deadline."""
    process, before = psutil.Process(load.server.process.pid), dict.fromkeys(COUNTED, 0.0)
    with httpx2.Client(timeout=60) as http:
        while time.monotonic() < load.deadline:
            now = load.server.metrics(http)
            for name in COUNTED:
                if now[name] < before[name]:
                    load.fault(f"{name} fell from {before[name]} to {now[name]}")
            if now[COUNTED[1]] > now[COUNTED[0]]:
                load.fault("more hits than queries")
            if sum(now[state] for state in STATES) != NUM_BLOCKS:
                load.fault(f"blocks do not add up: {[now[state] for state in STATES]}")
            before = now
            yield process.memory_info().rss / 2**20
            time.sleep(every_s)


def settle(server: ServerProcess) -> tuple[float, dict[str, float]]:
    """Seconds until nothing is live, and the metrics then."""
    with httpx2.Client(timeout=60) as http:
        begin = time.monotonic()
        while (metrics := server.metrics(http))[STATES[0]] and time.monotonic() < begin + 10:
            time.sleep(0.01)
        return time.monotonic() - begin, metrics


def compare(load: Load, reference: ServerProcess) -> tuple[int, int]:
    """How many different answers were compared, and how many of them differ at a near-tie of the reference."""
    num_compared = num_excused = 0
    with httpx2.Client(base_url=reference.url, timeout=120) as http:
        for (prompt, max_tokens), answers in load.answers.items():
            body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
            names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
            (choice,) = http.post("/v1/completions", json=body | names).raise_for_status().json()["choices"]
            for answer in answers:
                num_compared += 1
                if list(answer) == choice["token_ids"]:
                    continue
                pairs = zip(answer, choice["token_ids"], strict=True)
                step = next(index for index, (mine, right) in enumerate(pairs) if mine != right)
                best, other = sorted(choice["logprobs"]["top_logprobs"][step].values(), reverse=True)[:2]
                num_excused += best - other < NEAR_TIE
                if best - other >= NEAR_TIE:
                    load.fault(
                        f"a prompt of {len(prompt)} tokens: step {step} of {max_tokens} differs from the reference"
                    )
    return num_compared, num_excused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the result as JSON only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        limits = ("--num-blocks", str(NUM_BLOCKS), "--max-num-batched-tokens", "128", "--max-num-seqs", "16")
        with ServerProcess(folder, *limits) as server:
            load = Load(server, time.monotonic() + 60 * options.minutes, options.seed)
            threads = [threading.Thread(target=load.client, args=(number,)) for number in range(options.clients)]
            for thread in threads:
                thread.start()
            memory = list(watch(load, every_s=0.6 * options.minutes))
            for thread in threads:
                thread.join(120)
            settle_s, metrics = settle(server)
        with ServerProcess(folder, "--no-prefix-caching") as reference:
            num_compared, num_excused = compare(load, reference)
    quarter = max(1, len(memory) // 4)
    early, late = statistics.median(memory[quarter : 2 * quarter] or memory), statistics.median(memory[-quarter:])
    if metrics[STATES[0]] or settle_s > 1:
        load.fault(f"{metrics[STATES[0]]:.0f} blocks live {settle_s:.2f} s after the last request")
    if late > 1.1 * early:
        load.fault(f"resident memory rose from {early:.0f} to {late:.0f} MiB")
    if num_excused * 200 > num_compared:
        load.fault(f"{num_excused} of {num_compared} answers differ at near-ties")
    result = {
        "minutes": options.minutes,
        "requests": dict(load.outcomes),
        "finished_greedy_answers": load.num_answers,
        "different_answers_compared": num_compared,
        "near_ties": num_excused,
        "preemptions": metrics["num_preemptions_total"],
        "evicted_blocks": metrics["evicted_blocks_total"],
        "hit_rate": round(metrics[COUNTED[1]] / max(1.0, metrics[COUNTED[0]]), 3),
        "seconds_until_no_block_is_live": round(settle_s, 3),
        "resident_mib": {"second quarter": round(early, 1), "last quarter": round(late, 1)},
        "faults": load.faults[:20],
        "num_faults": len(load.faults),
    }
    print(json.dumps(result, indent=None if options.json else 2))
    return 1 if load.faults else 0


if __name__ == "__main__":
    sys.exit(main())
