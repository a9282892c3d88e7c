"""HA6.5: new weights never meet old K/V, whichever way a step runs, and nothing changes unless everything fits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import ids, make_tiny_llama

from anaphora import LLM, SamplingParams
from anaphora.core.hashing import root_digest
from anaphora.engine.async_engine import AsyncEngine
from anaphora.engine.engine import Engine
from anaphora.engine.request_group import NewRequest
from anaphora.errors import WeightsError

PROMPT = ids(65, 69)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
TOLERANCE, APART = 1e-3, 1e-2
VALUES = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture
def module() -> Any:
    return make_tiny_llama()


def make_llm(module: Any, **options: Any) -> LLM:
    return LLM(module, **({"num_blocks": 64} | options))


def ask(llm: LLM) -> Any:
    (output,) = llm.generate([PROMPT], PARAMS)
    assert output.error is None
    return output


def right(module: Any, output: Any) -> torch.Tensor:
    """What `transformers` gives for each chosen token."""
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = module(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0].float()
    scores = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1)
    return scores[range(len(tokens)), tokens]


def deviation(module: Any, output: Any) -> float:
    given = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids)]  # noqa: B905
    return float((right(module, output) - torch.tensor(given)).abs().max())


def scaled(name: str = VALUES) -> dict[str, torch.Tensor]:
    return {name: make_tiny_llama().state_dict()[name] * 1.5}


def changed(tensors: dict[str, torch.Tensor]) -> Any:
    """The model as it should be afterwards, made anew."""
    reference = make_tiny_llama()
    reference.load_state_dict(tensors, strict=False)
    return reference


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("name", [VALUES, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_new_weights_miss_and_equal_a_cold_run(module: Any, name: str, fast_forward: bool) -> None:
    llm = make_llm(module, fast_forward=fast_forward)
    old = ask(llm)
    assert ask(llm).num_cached_tokens == 64
    root = llm.engine.root
    tensors = scaled(name)
    assert llm.update_weights(tensors) == llm.engine.root != root
    new, again = ask(llm), ask(llm)
    assert [new.num_cached_tokens, again.num_cached_tokens] == [0, 64]
    reference = changed(tensors)
    assert deviation(reference, new) < TOLERANCE
    assert deviation(reference, again) < TOLERANCE
    assert deviation(reference, old) > APART  # else the test proves nothing


def test_the_root_follows_what_was_changed_and_never_comes_back(module: Any) -> None:
    roots = []
    for tensors in (scaled(), scaled(), scaled("lm_head.weight")):
        llm = make_llm(make_tiny_llama())
        roots.append(llm.update_weights(tensors))
        assert llm.engine.root == root_digest(llm.engine.identity)
    assert roots[0] == roots[1] != roots[2]
    llm = make_llm(module)
    first = llm.engine.root
    forth = llm.update_weights(iter(scaled().items()))
    back = llm.update_weights(make_tiny_llama().state_dict())
    assert forth == roots[0]
    assert len({first, forth, back}) == 3
    assert deviation(make_tiny_llama(), ask(llm)) < TOLERANCE


def test_two_roots_share_one_pool_and_the_memo_of_hashes(module: Any) -> None:
    llm = make_llm(module, num_blocks=12)
    for factor in (1.5, 1.0, 1.5):
        tensors = {VALUES: make_tiny_llama().state_dict()[VALUES] * factor}
        llm.update_weights(tensors)
        outputs = [ask(llm), ask(llm)]
        assert [output.num_cached_tokens for output in outputs] == [0, 64]
        assert max(deviation(changed(tensors), output) for output in outputs) < TOLERANCE
    assert llm.engine._scheduler.inconsistencies() == []


WEIGHT = make_tiny_llama().state_dict()[VALUES]


def with_one(value: float) -> torch.Tensor:
    return WEIGHT.index_put((torch.tensor(31), torch.tensor(63)), torch.tensor(value))  # the very last number


WRONG: dict[str, tuple[Any, str]] = {
    "not a number": ({VALUES: with_one(float("nan"))}, f"{VALUES} holds infinities or NaN"),
    "an infinity": ({VALUES: with_one(float("inf"))}, f"{VALUES} holds infinities or NaN"),
    "the other infinity": ({VALUES: with_one(float("-inf"))}, f"{VALUES} holds infinities or NaN"),
    "an unknown name": ({"model.layers.0.self_attn.v_prog.weight": WEIGHT}, "did you mean model.layers.0.self_attn.v"),
    "no name": ([(3, WEIGHT)], "no tensor 3"),
    "another shape": ({VALUES: WEIGHT.T}, "shape"),
    "another dtype": ({VALUES: WEIGHT.double()}, "convert it"),
    "no tensor": ({VALUES: WEIGHT.tolist()}, "dense tensor"),
    "a sparse tensor": ({VALUES: WEIGHT.to_sparse()}, "dense tensor"),
    "a tensor without values": ({VALUES: WEIGHT.to("meta")}, "dense tensor"),
    "a name twice": ([(VALUES, WEIGHT), (VALUES, WEIGHT)], "twice"),
    "nothing": ({}, "no tensor"),
    "a tensor alone": (WEIGHT, "pairs"),
    "a path": ("weights.safetensors", "pairs"),
    "triples": ([(VALUES, WEIGHT, 1)], "pairs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_has_changed(module: Any, case: str) -> None:
    tensors, message = WRONG[case]
    llm = make_llm(module)
    ask(llm)
    root = llm.engine.root
    pairs = list(tensors.items()) if isinstance(tensors, dict) else tensors
    if isinstance(pairs, list) and case != "nothing":
        pairs = [("lm_head.weight", torch.zeros(384, 64)), *pairs]  # fits, and comes first
    with pytest.raises(WeightsError, match=message):
        llm.update_weights(pairs)
    assert llm.engine.root == root
    output = ask(llm)
    assert output.num_cached_tokens == 64
    assert deviation(make_tiny_llama(), output) < TOLERANCE


def test_a_tensor_that_is_infinite_in_the_model_may_stay_so(module: Any) -> None:
    module.register_buffer("bias", torch.full((4,), float("-inf")))
    llm = make_llm(module)
    assert ask(llm).num_cached_tokens == 0
    llm.update_weights({"bias": torch.full((4,), float("-inf")), "model.norm.weight": torch.ones(64)})
    assert ask(llm).num_cached_tokens == 0


def test_tied_tensors_are_given_once_or_alike(module: Any) -> None:
    module.lm_head.weight = module.model.embed_tokens.weight
    llm = make_llm(module)
    new = module.lm_head.weight.detach() * 1.5
    with pytest.raises(WeightsError, match="one tensor"):
        llm.update_weights({"lm_head.weight": new, "model.embed_tokens.weight": new * 2})
    llm.update_weights({"lm_head.weight": new, "model.embed_tokens.weight": new.clone()})
    assert torch.equal(module.model.embed_tokens.weight, new)


def test_running_requests_are_in_the_way_and_end_with_an_error_if_asked(module: Any) -> None:
    llm = make_llm(module)
    stream = llm.stream(PROMPT, PARAMS)
    first = next(stream)
    with pytest.raises(WeightsError, match="1 requests are alive"):
        llm.update_weights(scaled())
    second = next(stream)
    llm.update_weights(scaled(), abort_running=True)
    (last,) = stream
    assert last.output is not None
    assert "weights were changed" in str(last.output.error)
    sequence = last.output.outputs[0]
    assert sequence.finish_reason == "error"
    assert sequence.token_ids == [*first.token_ids, *second.token_ids]
    assert deviation(make_tiny_llama(), last.output) < TOLERANCE  # purely the old
    output = ask(llm)
    assert output.num_cached_tokens == 0
    assert deviation(changed(scaled()), output) < TOLERANCE
    assert llm.stats().gauges.num_live_blocks == 0


def test_engines_that_share_the_module_refuse_to_mix_and_go_on_when_told(module: Any) -> None:
    one, other = make_llm(module), make_llm(module)
    ask(other)
    one.update_weights(scaled())
    (output,) = other.generate([PROMPT], PARAMS)
    assert "another engine" in str(output.error)
    other.update_weights(scaled())
    assert other.engine.root == one.engine.root  # as both compute the same
    output = ask(other)
    assert output.num_cached_tokens == 0
    assert deviation(changed(scaled()), output) < TOLERANCE
    assert ask(one).error is None
    other.update_weights(scaled())  # of no other engine: it counts as an update, whatever is in it
    (output,) = one.generate([PROMPT], PARAMS)
    assert "another engine" in str(output.error)
    one.update_weights(scaled())
    assert ask(one).num_cached_tokens == 0
    assert [ask(each).error for each in (one, other)] == [None, None]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_weights_are_changed_between_two_steps_of_an_engine_beside_it_never_within_one(
    module: Any, fast_forward: bool
) -> None:
    one, other = make_llm(module, fast_forward=fast_forward), make_llm(module)
    executor = one.engine._executor
    forward, begun, go_on = executor._forward, threading.Event(), threading.Event()

    def paused(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return forward(*args)

    executor._forward = paused
    one.engine.add_request("r", PROMPT, PARAMS)
    steps: list[Any] = []
    stepping = threading.Thread(target=lambda: steps.extend(one.engine.step()))
    changing = threading.Thread(target=lambda: other.update_weights(scaled()))
    stepping.start()
    assert begun.wait(30)
    changing.start()
    changing.join(0.3)
    assert changing.is_alive()
    go_on.set()
    stepping.join(30)
    changing.join(30)
    assert not stepping.is_alive() and not changing.is_alive()
    reference = SimpleNamespace(token_ids=list(steps[0].token_ids), logprobs=steps[0].logprobs)
    assert deviation(make_tiny_llama(), SimpleNamespace(outputs=[reference])) < TOLERANCE  # purely the old
    (last,) = one.engine.step()
    assert "another engine" in str(last.output.error)


@pytest.fixture
def engine(module: Any) -> Iterator[Engine]:
    yield make_llm(module).engine


def test_an_async_engine_ends_its_requests_and_serves_the_new(engine: Engine) -> None:
    async def main() -> None:
        service = AsyncEngine(engine)
        service.start()
        try:
            long = service.submit([NewRequest(PROMPT, SamplingParams(max_tokens=500, temperature=0.0))])
            await long.receive()
            with pytest.raises(WeightsError, match="alive"):
                await service.update_weights(scaled())
            await service.update_weights(scaled(), abort_running=True)
            while batch := await long.receive():
                _, last = batch[-1]
            assert last.output is not None
            assert last.output.outputs[0].finish_reason == "error"
            again = service.submit([NewRequest(PROMPT, PARAMS)])
            while batch := await again.receive():
                _, last = batch[-1]
            assert last.output is not None
            assert last.output.num_cached_tokens == 0
            assert deviation(changed(scaled()), last.output) < TOLERANCE
        finally:
            await service.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
