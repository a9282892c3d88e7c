"""Claims: every moment until the first token belongs to the part in which it passed, and the parts add up to the total.

The clock moves only where a test moves it, so every figure is exact.
"""

from __future__ import annotations

import random
from dataclasses import astuple
from typing import Any

import pytest
from engine_fakes import ByteTokenizer, make_engine, run

from anaphora.engine.ttft import TtftParts
from anaphora.sampling_params import SamplingParams

PROMPT = list(range(40, 60))
# The fake executor says of each step that it samples for an eighth of a second.


def slowed(**options: Any) -> tuple[Any, Any]:
    """An engine whose hashing takes 2 s, a look-up 3 s, the executor 10 s and a commit 1 s; and its clock."""
    engine, executor, clock = make_engine(**options)
    cache = engine._scheduler.cache

    def slow(function: Any, seconds: float) -> Any:
        def call(*args: Any) -> Any:
            clock.now_s += seconds
            return function(*args)

        return call

    cache.register, cache.look_up, cache.commit = slow(cache.register, 2), slow(cache.look_up, 3), slow(cache.commit, 1)
    executor.before = slow(executor.before, 10)
    return engine, clock


def parts_of(outputs: dict[str, Any]) -> dict[str, TtftParts]:
    """Of each request; and that they add up."""
    for output in outputs.values():
        assert output.metrics.ttft_parts.total_s == output.metrics.ttft_s
    return {name: output.metrics.ttft_parts for name, output in outputs.items()}


def test_a_prompt_in_two_chunks():
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            clock.now_s += 5
            return super().encode(text, add_special_tokens=add_special_tokens)

    engine, clock = slowed(max_num_batched_tokens=16, tokenizer=SlowTokenizer())
    before = TtftParts(receive_s=1, tokenize_s=0.5)
    engine.add_request("a", "x" * 20, SamplingParams(max_tokens=3), arrival_s=98.0, before=before)
    clock.now_s += 7
    outputs, deltas = run(engine)
    # arrival at 98, taken up at 100 with 1.5 of it accounted for; a commit in each of the two steps
    right = TtftParts(1, 0.5 + 5, 0.5 + 7, 2 + 3, 0, 2 * 9.875, 2 * 0.125, 2 * 1)
    assert parts_of(outputs) == {"a": right}
    assert [delta.ttft_parts for delta in deltas["a"]] == [right, None, None]


def test_a_hit_saves_compute_and_nothing_else():
    engine, clock = slowed(max_num_batched_tokens=8)
    for name in ("cold", "warm"):
        engine.add_request(name, PROMPT, SamplingParams(max_tokens=1))
        clock.now_s += 1
        (parts,) = parts_of(run(engine)[0]).values()
        steps = 3 if name == "cold" else 1
        assert parts == TtftParts(0, 0, 1, 5, 0, steps * 9.875, steps * 0.125, steps)


def test_who_waits_for_a_leader_is_told_apart_from_who_waits_for_its_turn():
    engine, _ = slowed(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_seqs=2)
    for name, prompt in (("leader", PROMPT), ("follower", [*PROMPT[:16], 1, 2]), ("third", PROMPT[::-1])):
        engine.add_request(name, prompt, SamplingParams(max_tokens=1))
    # Step 1: the leader's first 8 tokens; the follower looks up and follows; the third one is admitted beside it.
    # Step 2: 8 more of each: the leader has what they share, so the follower is queued again; the house is full.
    # Step 3: the last 4 of each. Step 4: the follower finds 16 tokens.
    parts = parts_of(run(engine)[0])
    chunks = TtftParts(compute_s=3 * 9.875, sample_s=3 * 0.125)
    assert (parts["leader"].queue_s, parts["leader"].lookup_s, parts["leader"].follow_s) == (2 + 2, 2 + 3, 0)
    assert (parts["third"].queue_s, parts["third"].lookup_s, parts["third"].follow_s) == (3 + 3, 2 + 3, 0)
    for name in ("leader", "third"):
        assert (parts[name].compute_s, parts[name].sample_s) == (chunks.compute_s, chunks.sample_s)
    follower = parts["follower"]
    # the third one's look-up (3), step 1 and its two commits
    assert follower.follow_s == 3 + 10 + 2
    assert follower.queue_s == 2 + 3 + (10 + 2) + (10 + 2)  # hashing the third, the leader's look-up, steps 2 and 3
    assert follower.lookup_s == 2 + 3 + 3
    assert (follower.compute_s, follower.sample_s, follower.other_s) == (9.875, 0.125, 1)


def test_who_does_not_fit_has_been_looked_up_and_is_queued():
    engine, _ = slowed(num_blocks=6)
    engine.add_request("a", PROMPT[:12], SamplingParams(max_tokens=2))
    engine.add_request("b", PROMPT[::-1], SamplingParams(max_tokens=1))
    # Steps 1 and 2: a; b needs five blocks of six, and is looked up again only when a has given its three back.
    parts = parts_of(run(engine)[0])["b"]
    assert parts == TtftParts(0, 0, 3 + 2 * (10 + 1), 2 + 3 + 3, 0, 9.875, 0.125, 1)


def test_a_preemption_before_the_first_token_counts_what_was_computed_in_vain_and_the_wait_after_it():
    engine, _ = slowed(num_blocks=8, max_num_batched_tokens=8)
    engine.add_request("a", PROMPT[:12], SamplingParams(max_tokens=2))
    engine.add_request("b", PROMPT[::-1], SamplingParams(max_tokens=1))
    # Step 1: 8 of a. Step 2: 4 of a, 4 of b. Step 3: a needs a fourth block, b gives its five back. Steps 4 to 6: b.
    outputs, _ = run(engine)
    assert outputs["b"].metrics.num_preemptions == 1
    parts = parts_of(outputs)
    assert parts["b"].queue_s == 3 + (10 + 1) + (10 + 1)  # a's look-up, steps 1 and 3
    assert parts["b"].compute_s == (1 + 2) * 9.875  # one step in vain, all but its block; then 16 tokens in two
    assert parts["b"].lookup_s == 2 + 2 * 3


def test_what_comes_after_the_first_token_changes_nothing():
    engine, _ = slowed(num_blocks=8, max_num_batched_tokens=24, enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT[:12], SamplingParams(max_tokens=16))
    outputs, deltas = run(engine)
    assert outputs["b"].metrics.num_preemptions == 1
    assert deltas["b"][0].ttft_parts == parts_of(outputs)["b"] != parts_of(outputs)["a"]


def test_a_request_without_a_token_has_no_parts():
    engine, _ = slowed()
    engine.add_request("scored", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    engine.add_request("ended", PROMPT, SamplingParams())
    (ended,) = engine.abort("ended")
    (scored,) = run(engine)[0].values()
    for output in (ended, scored):
        assert (output.metrics.ttft_s, output.metrics.ttft_parts) == (None, None)


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_whatever_happens(seed):
    """The clock ticks whenever anybody looks at it. Requests share beginnings, follow, are chunked and preempted."""
    rng = random.Random(seed)
    engine, _, clock = make_engine(
        num_blocks=rng.choice([10, 16, 64]),
        max_num_batched_tokens=rng.choice([5, 9, 32]),
        long_prefill_token_threshold=rng.choice([None, 4]),
        max_num_seqs=rng.choice([2, 4]),
    )
    clock.tick_s = 1
    finished, number = [], 0
    while number < 25 or engine.has_unfinished:
        if number < 25 and rng.random() < 0.6:
            prompt = PROMPT[: rng.randrange(1, 20)] + [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
            before = TtftParts(receive_s=rng.randrange(3))
            arrival_s = clock.now_s - 10
            engine.add_request(
                str(number), prompt, SamplingParams(max_tokens=rng.randrange(1, 8)), arrival_s=arrival_s, before=before
            )
            number += 1
        finished += [step.output for step in engine.step() if step.output is not None]
    assert len(finished) == 25
    for output in finished:
        assert output.metrics.ttft_parts.total_s == output.metrics.ttft_s > 10
        assert min(astuple(output.metrics.ttft_parts)) >= 0
