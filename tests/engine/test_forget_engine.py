"""`Engine.forget` and `LLM.forget`: what the arguments mean, and what they may not be."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import make_engine

from anaphora.api.llm import LLM
from anaphora.errors import InvalidParameterError, InvalidTokenError, UnknownAdapterError
from anaphora.salt_regions import SaltRegions
from anaphora.sampling_params import SamplingParams

PROMPT = list(range(40))
ONE = SamplingParams(max_tokens=1)


def make_llm() -> tuple[LLM, int]:
    engine, _, _ = make_engine()
    return LLM.from_engine(engine), engine.block_size


def hit(llm: LLM, salt: Any = None, prompt: Any = PROMPT) -> int:
    (output,) = llm.generate([prompt], ONE, cache_salt=salt)
    return output.num_cached_tokens


def test_a_salt_and_a_prefix_and_nothing_else() -> None:
    llm, block_size = make_llm()
    full = (len(PROMPT) - 1) // block_size * block_size
    for salt in (None, "a", "b"):
        assert [hit(llm, salt), hit(llm, salt)] == [0, full]
    assert llm.forget(salt="a") is None
    assert [hit(llm, salt) for salt in (None, "a", "b", "a")] == [full, 0, full, full]
    assert llm.forget(prefix=PROMPT[: block_size + 1], salt="b") == block_size
    assert [hit(llm, salt) for salt in (None, "a", "b")] == [full, full, 0]
    regions = SaltRegions([(block_size, "a")])
    assert hit(llm, regions) == block_size
    assert llm.forget(prefix=PROMPT[: 2 * block_size], salt=regions) == 2 * block_size
    assert [hit(llm, salt) for salt in (None, "a", regions)] == [full, full, block_size]


def test_a_text_prefix_is_tokenised_as_a_prompt_is() -> None:
    llm, block_size = make_llm()
    text = "<bos>" + "x" * 40
    hit(llm, prompt=text)
    assert hit(llm, prompt=text) > 0
    assert llm.forget(prefix=text[: 2 * block_size - 1]) == 2 * block_size  # with the special token
    assert hit(llm, prompt=text) == block_size


def test_a_stream_that_runs_goes_on_as_it_was() -> None:
    llm, _ = make_llm()
    params = SamplingParams(max_tokens=12)
    (expected,) = llm.generate([PROMPT], params, cache_salt="other")
    stream = llm.stream(PROMPT, params, cache_salt="a")
    next(stream)
    llm.forget(salt="a")
    *_, last = stream
    assert last.output is not None
    assert last.output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert last.output.outputs[0].finish_reason == expected.outputs[0].finish_reason
    assert hit(llm, "a") == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, InvalidParameterError),
        ({"salt": ""}, InvalidParameterError),
        ({"salt": 1}, InvalidParameterError),
        ({"salt": SaltRegions([(0, "a")])}, InvalidParameterError),
        ({"salt": "a", "adapter": "ab" * 32}, InvalidParameterError),
        ({"adapter": "none"}, UnknownAdapterError),
        ({"adapter": "AB" * 32}, UnknownAdapterError),
        ({"adapter": 7}, UnknownAdapterError),
        ({"prefix": [1]}, InvalidParameterError),
        ({"prefix": []}, ValueError),
        ({"prefix": [True] * 16}, InvalidTokenError),
        ({"prefix": [-1] * 16}, InvalidTokenError),
        ({"prefix": 7}, InvalidParameterError),
    ],
)
def test_what_says_nothing_certain_is_refused_and_nothing_is_lost(arguments: dict[str, Any], error: type) -> None:
    llm, _ = make_llm()
    hit(llm, "a")
    found = hit(llm, "a")
    with pytest.raises(error):
        llm.forget(**arguments)
    assert hit(llm, "a") == found > 0
