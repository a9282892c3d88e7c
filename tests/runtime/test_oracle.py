"""The one oracle: cache on == cache off == `transformers`, in logprobs, whatever the engine does to a request.

Each finished output is checked against one plain forward pass of `transformers` over its own tokens: every chosen
token must be the likeliest one there, and its log-probability must agree within 1e-3.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.core import check_scheduler
from anaphora.engine.outputs import RequestOutput

TOLERANCE = 1e-3
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def reference():  # type: ignore[no-untyped-def]
    return make_tiny_llama()


@pytest.fixture(scope="module")
def module():  # type: ignore[no-untyped-def]
    return make_tiny_llama()


def is_exact(reference, output: RequestOutput) -> None:  # type: ignore[no-untyped-def]
    sequence = output.outputs[0]
    tokens = torch.tensor([output.prompt_token_ids + sequence.token_ids])
    with torch.inference_mode():
        logits = reference(input_ids=tokens, use_cache=False).logits[0].float()
    right = torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1], dim=-1)
    best = right.topk(2, dim=-1)
    assert sequence.logprobs is not None
    for step, (token, entry) in enumerate(zip(sequence.token_ids, sequence.logprobs, strict=True)):
        assert abs(entry[token].logprob - float(right[step, token])) < TOLERANCE
        gap = float(best.values[step, 0] - best.values[step, 1])
        assert token == int(best.indices[step, 0]) or gap < NEAR_TIE


def workload(seed: int, count: int = 24) -> list[tuple[list[int], str | None, int]]:
    """(prompt, salt, max_tokens): few stems, some repeated in full, some cut, some salted."""
    draw = random.Random(seed)
    stems = [ids(100 * seed + number, draw.randrange(1, 130)) for number in range(4)]
    requests = []
    for number in range(count):
        stem = draw.choice(stems)
        prompt = stem[: draw.randrange(1, len(stem) + 1)] if draw.random() < 0.3 else list(stem)
        prompt += ids(7000 + 100 * seed + number, draw.randrange(0, 30))
        requests.append((prompt, draw.choice([None, None, "a", "b"]), draw.randrange(1, 24)))
    return requests


def run(llm: LLM, seed: int, abort: bool = False) -> list[RequestOutput]:
    """The workload, arriving over time; invariants after every step."""
    engine, draw = llm.engine, random.Random(seed)
    todo = [(f"r{number}", *request) for number, request in enumerate(workload(seed))]
    outputs = []
    while todo or engine.has_unfinished:
        while todo and draw.random() < 0.6:
            request_id, prompt, salt, max_tokens = todo.pop(0)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2)
            engine.add_request(request_id, prompt, params, cache_salt=salt)
            if abort and draw.random() < 0.2:
                engine.add_request(f"x{request_id}", [*prompt, 8], params, cache_salt=salt)
        outputs += [step.output for step in engine.step() if step.output is not None]
        check_scheduler(engine._scheduler)
        if abort and draw.random() < 0.3:
            alive = [name for name in list(engine._live) if name.startswith("x")]
            if alive:
                engine.abort(draw.choice(alive))
    return [output for output in outputs if not output.request_id.startswith("x")]


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(
    ("budget", "caching", "num_blocks"),
    [*itertools.product((7, 16, 17, 512), (True, False), (256,)), *itertools.product((16, 512), (True, False), (20,))],
)
def test_every_output_is_what_transformers_gives(  # type: ignore[no-untyped-def]
    reference, module, budget, caching, num_blocks, fast_forward
) -> None:
    llm = LLM(
        module,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        enable_prefix_caching=caching,
        dtype="float32",
        fast_forward=fast_forward,
    )
    outputs = run(llm, seed=budget)
    assert len(outputs) == 24
    for output in outputs:
        is_exact(reference, output)
    counters = llm.stats().counters
    assert (counters.num_hit_tokens > 0) == caching
    if num_blocks == 20:  # the tiny pool is there to preempt and evict
        assert counters.num_preemptions > 0
        assert counters.num_evicted_blocks > 0 or not caching
    assert llm.stats().gauges.num_live_blocks == 0


def test_aborted_neighbours_change_nothing(reference, module) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(module, num_blocks=40, max_num_batched_tokens=32, max_num_seqs=6, dtype="float32")
    outputs = run(llm, seed=5, abort=True)
    assert llm.stats().counters.num_aborted_requests > 0
    for output in outputs:
        is_exact(reference, output)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_any_block_size(reference, module, block_size) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(module, block_size=block_size, num_blocks=2048 // block_size, dtype="float32", max_num_batched_tokens=64)
    for output in run(llm, seed=9):
        is_exact(reference, output)


def test_streaming_gives_the_same_tokens(reference, module) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(module, num_blocks=64, dtype="float32")
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    prompt = ids(42, 70)
    for _ in range(2):
        steps = list(llm.stream(prompt, params))
        final = steps[-1].output
        assert final is not None
        assert [token for step in steps for token in step.token_ids] == final.outputs[0].token_ids
        is_exact(reference, final)
    assert final.num_cached_tokens == 64


def test_the_salt_changes_hits_and_not_answers(reference, module) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(module, num_blocks=64, dtype="float32")
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
    hits = []
    for salt in ("a", "a", "b", "b", None, None, "a"):
        output = llm.generate([ids(2200, 69)], params, cache_salt=salt)[0]
        is_exact(reference, output)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 64, 0, 64, 0, 64, 64]


def test_a_failed_step_leaves_nothing_wrong_behind(reference, module) -> None:  # type: ignore[no-untyped-def]
    llm = LLM(module, num_blocks=64, dtype="float32", max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
    prompt = ids(77, 90)
    calls = 0

    def fail_in_the_second_chunk(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("injected")

    hook = module.model.layers[2].register_forward_pre_hook(fail_in_the_second_chunk)
    try:
        broken = llm.generate([prompt], params)[0]
    finally:
        hook.remove()
    assert broken.outputs[0].finish_reason == "error"
    assert "injected" in str(broken.error)
    check_scheduler(llm.engine._scheduler)
    again = llm.generate([prompt], params)[0]
    assert again.num_cached_tokens == 32  # the first chunk had succeeded
    is_exact(reference, again)
