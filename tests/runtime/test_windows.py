"""Claims: windowed, chunked and mixed models compute what their own classes do, whatever was given back or found.

The log-probabilities of all prompt tokens and outputs are compared with the class's own forward over all tokens
(within 1e-3); in between, blocks that a window has passed are filled with NaN and given to others.
"""

from __future__ import annotations

import pytest
import torch
from grouped_driver import GroupedDriver
from tiny_llama import ids
from windowed_models import FAMILIES

SIZES = {
    "mistral": (1, 5, 8, 19, 100),
    "llama4": (1, 5, 8, 19, 100),
    "gpt_oss": (1, 8),
    "gemma3": (5,),
    "gemma4": (6,),
    "qwen3": (19,),
}
"""Windows and chunks: of one token, not of whole blocks, of whole blocks, of several, longer than any text here."""

MODELS = [(family, size) for family in FAMILIES for size in SIZES[family]]


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_chunked_prompts_and_long_outputs_while_others_overwrite_what_was_given_back(family: str, size: int) -> None:
    driver = GroupedDriver(FAMILIES[family](size), block_size=4)
    driver.add("a", ids(1, 50))
    driver.add("b", ids(2, 23))
    driver.add("c", ids(3, 3))
    driver.run(a=1)
    driver.run(a=13, b=7)
    driver.run(a=13, b=16, c=3)
    driver.run(a=22, b=1, c=1)
    driver.run(a=1, c=1)
    for _ in range(40):  # single tokens only, then a chunk beside them
        driver.run(a=1, b=1, c=1)
    driver.add("d", ids(4, 30))
    driver.run(b=1, d=29, a=1)
    driver.run(d=1, a=1, c=1)
    driver.check()
    for kind, live in zip(driver.kinds, driver.most_live, strict=True):
        visible = max(position - kind.first_visible(position) for position in range(100)) + 1
        assert live <= -(-visible // 4) + 1


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_block_size(family: str, block_size: int) -> None:
    driver = GroupedDriver(FAMILIES[family](10), block_size=block_size)
    driver.add("a", ids(1, 37))
    driver.add("b", ids(2, 12))
    driver.run(a=20, b=12)
    driver.run(a=17, b=1)
    for _ in range(14):
        driver.run(a=1, b=1)
    driver.check()


@pytest.mark.parametrize(("family", "size"), MODELS)
def test_a_hit_needs_only_the_blocks_that_its_next_token_sees(family: str, size: int) -> None:
    """Computed in one chunk, in two, or as single tokens of one batch."""
    driver = GroupedDriver(FAMILIES[family](size), block_size=4)
    driver.add("source", ids(1, 49), keep=True)
    driver.run(source=49)
    for hit in (4, 8, 16, 20, 24, 40, 48):
        driver.add("one", [*ids(1, 49)[:hit], *ids(hit, 9)], like="source", hit=hit)
        driver.add("two", ids(1, 49), like="source", hit=hit)
        driver.add("three", [*ids(1, 49)[:hit], 9], like="source", hit=hit)
        driver.run(one=9, two=1, three=1)
        driver.run(three=1, one=1, **({"two": 48 - hit} if hit < 48 else {}))
        driver.run(three=1, two=1, one=1)
        driver.finish("one", "two", "three")


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_share_blocks_that_the_same_step_writes(family: str) -> None:
    driver = GroupedDriver(FAMILIES[family](6), block_size=4)
    shared = ids(1, 24)
    driver.add("a", [*shared, *ids(2, 6)], keep=True)
    driver.cover("a", 30)
    driver.add("b", [*shared, *ids(3, 9)], like="a", hit=24)
    driver.add("c", [*shared, 7], like="a", hit=24)
    driver.run(c=1, a=30, b=9)
    driver.run(c=1, a=1, b=1)
    driver.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failed_request_is_wiped_in_every_group(family: str) -> None:
    module = FAMILIES[family](6)
    driver = GroupedDriver(module, block_size=4)
    with torch.no_grad():
        module.get_input_embeddings().weight.data[5] = torch.nan  # unseen by the guard of weights
    driver.add("a", [*ids(1, 11), 5, *ids(2, 8)])
    driver.cover("a", 20)
    driver.executor.cache.wipe(torch.arange(400 * 4))
    driver.run_unchecked("a", 8)
    written = driver.written("a")
    assert written == [set(range(8))] * len(driver.kinds)
    result = driver.run_unchecked("a", 12)
    assert list(result.failed) == ["a"]
    assert driver.written("a") == written
