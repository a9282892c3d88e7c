"""HA6: a reset tells the truth, over HTTP. Steps 1 and 2 are in tests/server/test_lifecycle, and with step 5 in
test_ha06_weights; there is no tier and no event here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from http_subject import HttpLLM, settled, slowed, start_http
from subject import Comparison, cap, cold, gen, params
from tiny_llama import ids


@pytest.fixture
def llm() -> Iterator[HttpLLM]:
    """Two run at once, 16 tokens a step."""
    with start_http(max_num_seqs=2, max_num_batched_tokens=16) as llm:
        yield llm


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


def reset(llm: HttpLLM, **body: Any) -> int:
    reply = llm.live.client.post("/reset_prefix_cache", json=body)
    assert reply.json()["reset"] == (reply.status_code == 200)
    return int(reply.status_code)


def test_a_reset_with_one_that_streams_one_in_its_prompt_and_one_that_waits(llm: HttpLLM) -> None:
    p, comparison = ids(2600, 85), Comparison()
    streaming, long, waiting = p + ids(2601, 40), ids(2602, 900), p + ids(2603, 5)
    gen(llm, p)
    assert gen(llm, p).num_cached_tokens == cap(85)  # GUARD
    with ThreadPoolExecutor(3) as pool, slowed(llm, 0.01):
        first = pool.submit(lambda: [*llm.stream(streaming, params(300))][-1].output)
        until(lambda: llm.stats().counters.num_generated_tokens > 5)
        second = pool.submit(gen, llm, long, 8)
        until(lambda: llm.stats().gauges.num_running == 2)
        third = pool.submit(gen, llm, waiting, 8)
        until(lambda: llm.stats().gauges.num_waiting == 1)
        assert reset(llm) == 409
        before = llm.stats()
        assert before.gauges.num_live_blocks > 0
        assert reset(llm, preempt_running=True) == 200
        assert llm.stats().counters.num_hit_tokens == before.counters.num_hit_tokens  # counters are not zeroed
    for done, prompt, num_outputs in ((first, streaming, 300), (second, long, 8), (third, waiting, 8)):
        output = done.result()
        assert output is not None
        comparison.equal(output, cold(prompt, num_outputs))
    comparison.close()
    # The one that waited found what its preempted neighbour had computed again, or nothing: never what was forgotten.
    assert third.result().num_cached_tokens in (0, cap(85))
    assert settled(llm).gauges.num_live_blocks == 0


def test_a_hundred_resets_amid_fifty_requests_change_no_answer(llm: HttpLLM) -> None:
    comparison, prompts = Comparison(), [ids(2610 + number % 7, 30 + number) for number in range(50)]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(gen, llm, prompt, 4) for prompt in prompts]
        statuses = [reset(llm, preempt_running=number % 2 == 0) for number in range(100)]
    assert statuses[::2] == [200] * 50
    for one, prompt in zip(done, prompts, strict=True):
        comparison.equal(one.result(), cold(prompt, 4))
    comparison.close()
    assert settled(llm).gauges.num_live_blocks == 0
