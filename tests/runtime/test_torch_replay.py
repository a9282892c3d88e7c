"""The simulator says what the torch engine does: the same trace gives the same hits, request for request."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import VOCAB_SIZE, ids
from transformers import LlamaForCausalLM

from anaphora import LLM, SamplingParams
from anaphora.sim import Trace, TraceRequest, replay_sequential
from anaphora.sim.mooncake import read_mooncake
from anaphora.sim.reading import read_trace
from anaphora.sim.workloads import generate_trace, workload

EXCERPT = Path(__file__).parents[1] / "sim" / "traces" / "conversation_head.jsonl"
BLOCK = 8


def tokens_of(trace: Trace, request: TraceRequest) -> list[int]:
    """A prompt in which every block follows from its id: equal beginnings where, and only where, the ids are equal."""
    blocks = [random.Random(number).choices(range(8, VOCAB_SIZE), k=trace.block_size) for number in request.hash_ids]
    return [token for block in blocks for token in block][: request.input_length]


def played(module: LlamaForCausalLM, trace: Trace, num_blocks: int, **options: object) -> list[int]:
    """Hit tokens of each request in the torch engine, one after the other; -1 for a refused one."""
    llm = LLM(module, block_size=BLOCK, num_blocks=num_blocks, max_num_batched_tokens=4096, **options)
    hits = []
    for request in trace.requests:
        if request.input_length > num_blocks * BLOCK:
            hits.append(-1)
            continue
        params = SamplingParams(max_tokens=max(1, request.output_length), temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([tokens_of(trace, request)], params)
        hits.append(output.num_cached_tokens)
    return hits


def small(request: TraceRequest) -> TraceRequest:
    """512 tokens become 8, rounded so that a partial block stays a partial one."""
    full, tail = divmod(request.input_length, 512)
    length = full * BLOCK + (max(1, tail * BLOCK // 512) if tail else 0)
    return replace(request, input_length=length, output_length=1 + request.output_length % 11)


@pytest.mark.parametrize("num_blocks", [60, 200])
def test_an_excerpt_of_a_real_trace(tiny_llama: LlamaForCausalLM, num_blocks: int) -> None:
    requests = [small(request) for request in read_mooncake(EXCERPT).requests[:24]]
    trace = Trace("excerpt", BLOCK, requests)
    hits: list[int] = []
    replay_sequential(trace, num_blocks, BLOCK, with_outputs=True, hits=hits)
    assert hits == played(tiny_llama, trace, num_blocks)
    assert sum(hit > 0 for hit in hits) > 3


@pytest.mark.parametrize("policy", ["lru", "learnt-hazard"])
def test_a_generated_workload(tiny_llama: LlamaForCausalLM, policy: str) -> None:
    wanted = workload("rag", requests=30, groups=8, shared_tokens=20, own_tokens=6, output_tokens=9, seed=5)
    made = generate_trace(wanted, BLOCK)
    trace = replace(made, requests=[replace(request, output_hash_ids=()) for request in made.requests])
    hits: list[int] = []
    result = replay_sequential(trace, 40, BLOCK, policy, with_outputs=True, hits=hits)
    assert hits == played(tiny_llama, trace, 40, eviction_policy=policy)
    assert result.num_hit_tokens > 0 < result.num_evicted_blocks


@pytest.mark.parametrize("policy", ["lru", "lru-2"])
def test_a_recording_replays_to_the_very_hits_that_it_was_recorded_with(
    tiny_llama: LlamaForCausalLM, tmp_path: Path, policy: str
) -> None:
    """Conversations of two tenants that take turns, in a pool that is too small for them."""
    path = tmp_path / "t.jsonl"
    llm = LLM(tiny_llama, block_size=4, num_blocks=60, eviction_policy=policy, record=path)
    params = SamplingParams(max_tokens=7, temperature=0.0)
    turns = {salt: ids(1, 30) for salt in ("a", "b", None)}
    hits = []
    draw = random.Random(3)
    for number in range(25):
        salt = draw.choice(list(turns))
        (output,) = llm.generate([turns[salt]], params, cache_salt=salt)
        hits.append(output.num_cached_tokens)
        longer = output.prompt_token_ids + output.outputs[0].token_ids + ids(number, 3)
        turns[salt] = longer if len(longer) < 150 else ids(number % 3, 20)
    assert llm.engine.recorder is not None
    llm.engine.recorder.close()
    trace = read_trace(path)
    replayed: list[int] = []
    result = replay_sequential(trace, 60, 4, policy, with_outputs=True, hits=replayed)
    assert replayed == hits == [request.num_cached_tokens for request in trace.requests]
    assert result.num_evicted_blocks == llm.stats().counters.num_evicted_blocks > 0
    assert trace.recorded_hit_rate == result.hit_rate > 0.3
