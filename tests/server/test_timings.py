"""Where the time to first token went, over HTTP: on every generating endpoint, whole and streamed."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx2
import pytest
from server_world import PATIENCE_S, Live, serving
from tiny_llama import ids

pytestmark = pytest.mark.timing

PARTS = ["receive", "tokenize", "queue", "lookup", "follow", "compute", "sample", "other"]
TEXT = "When is high tide? " * 20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
}


def events(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    with live.client.stream("POST", path, json={**body, "stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def timings(live: Live, path: str, stream: bool, **body: Any) -> dict[str, Any]:
    if not stream:
        return live.post(path, return_timings=True, **body)["timings"]
    *others, last = events(live, path, return_timings=True, **body)
    assert not any("timings" in event for event in others)
    return last["response"]["timings"] if "response" in last else last["timings"]


def check(shown: dict[str, Any], seconds: float) -> None:
    """Parts and sums are exact in what is shown, and no more than what the client has waited."""
    assert list(shown["ttft_parts_ms"]) == PARTS
    assert min(shown["ttft_parts_ms"].values()) >= 0
    assert shown["ttft_ms"] == round(sum(shown["ttft_parts_ms"].values()), 1)
    assert shown["e2e_ms"] == round(shown["ttft_ms"] + shown["decode_ms"], 1)
    assert 0 < shown["ttft_ms"] <= shown["e2e_ms"] < 1000 * seconds + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_parts_add_up_and_no_moment_is_counted_twice(live: Live, path: str, stream: bool) -> None:
    begin_s = time.perf_counter()
    shown = timings(live, path, stream, **BODIES[path])
    check(shown, time.perf_counter() - begin_s)
    assert shown["ttft_parts_ms"]["compute"] > 0
    assert "timings" not in live.post(path, **BODIES[path])
    assert not any("timings" in json.dumps(event) for event in events(live, path, **BODIES[path]))


def test_with_usage_they_come_beside_it(live: Live) -> None:
    body = {**BODIES["/v1/completions"], "stream_options": {"include_usage": True}}
    last = events(live, "/v1/completions", return_timings=True, **body)[-1]
    assert (last["choices"], last["usage"]["completion_tokens"], "timings" in last) == ([], 4, True)


def test_each_part_is_the_time_of_what_it_names(make_engine: Any) -> None:
    """Each thing is made slow in turn; then its own part is the largest."""
    engine = make_engine()
    with serving(engine) as live:
        executor, cache = engine._executor, engine._scheduler.cache
        (endpoint,) = (route.endpoint for route in live.app.routes if route.path == "/v1/completions")
        for owner, name, part in (
            (engine.tokenizer, "encode", "tokenize"),
            (cache, "look_up", "lookup"),
            (cache, "register", "lookup"),
            (executor, "execute", "compute"),
            (cache, "commit", "other"),
            (endpoint.engine._steps, "_deliver", "other"),
        ):
            with slowed(owner, name):
                shown = timings(live, "/v1/completions", False, prompt=f"{name} {TEXT}", max_tokens=1)
            check(shown, 60)
            parts = shown["ttft_parts_ms"]
            assert parts[part] >= 300, name
            assert max(parts, key=parts.__getitem__) == part, name


class slowed:  # reads as a verb
    """A method that takes longer."""

    def __init__(self, owner: Any, name: str, seconds: float = 0.3) -> None:
        self.owner, self.name, self.seconds = owner, name, seconds

    def __enter__(self) -> None:
        self.own = vars(self.owner).get(self.name)  # None: the class has it
        method = getattr(self.owner, self.name)
        setattr(self.owner, self.name, lambda *args, **kwargs: (time.sleep(self.seconds), method(*args, **kwargs))[1])

    def __exit__(self, *error: object) -> None:
        if self.own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


def test_a_body_that_arrives_slowly_is_received_and_a_full_house_is_queued_for(make_engine: Any) -> None:
    engine = make_engine(max_num_seqs=1)
    with serving(engine) as live, slowed(engine._executor, "execute"):
        first = threading.Thread(target=live.generate, args=([8, 9], 6))
        first.start()
        while not live.metrics()["num_requests_running"]:
            time.sleep(0.005)
        data = json.dumps({"prompt": [8, 9, 10], "max_tokens": 1, "return_timings": True}).encode()

        def slowly() -> Any:
            yield data[:5]
            time.sleep(0.2)
            yield data[5:]

        with httpx2.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            shown = client.post("/v1/completions", content=slowly()).json()["timings"]
        first.join(PATIENCE_S)
        check(shown, 60)
        parts = shown["ttft_parts_ms"]
        assert parts["receive"] >= 190
        assert parts["queue"] >= 300  # at least one whole step of the other one, in part while the body came
        assert parts["compute"] >= 300


def test_a_scored_prompt_has_no_first_token(live: Live) -> None:
    shown = live.generate(ids(1, 20), 0, prompt_logprobs=0, return_timings=True)["timings"]
    assert shown.pop("e2e_ms") > 0
    assert shown == {"ttft_parts_ms": None, "ttft_ms": None, "decode_ms": None}


def test_a_request_of_another_salt_is_told_of_no_leader(make_engine: Any) -> None:
    """What runs under another salt shows as nobody's beginning; under the same one as what it is."""
    engine = make_engine(long_prefill_token_threshold=16, max_num_batched_tokens=64)
    prompt = ids(5, 200)
    with serving(engine) as live:
        (endpoint,) = (route.endpoint for route in live.app.routes if route.path == "/v1/completions")
        execute = engine._executor.execute

        def first_with_both(plan: Any) -> Any:
            """The leader computes nothing before the other one is there."""
            while endpoint.engine.num_unfinished < 2:
                time.sleep(0.005)
            engine._executor.execute = execute
            return execute(plan)

        for salt, follows in (("b", False), ("a", True)):
            live.reset()
            engine._executor.execute = first_with_both
            leader = threading.Thread(target=live.generate, args=(prompt, 1), kwargs={"cache_salt": "a"})
            leader.start()
            while endpoint.engine.num_unfinished < 1:
                time.sleep(0.005)
            with httpx2.Client(base_url=live.url, timeout=PATIENCE_S) as client:
                body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt, "return_timings": True}
                parts = client.post("/v1/completions", json=body).json()["timings"]["ttft_parts_ms"]
            leader.join(PATIENCE_S)
            assert (parts["follow"] > 0) == follows, salt
