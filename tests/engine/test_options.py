"""Claims: sizes and names in an EngineConfig become what they say, or an error that says what to do."""

from __future__ import annotations

import hashlib
import sys

import pytest

from anaphora import LLM
from anaphora.api.options import context_limit, find_hash_function, pool_size
from anaphora.config import EngineConfig
from anaphora.errors import ConfigError


def size(**options) -> int:
    config = EngineConfig(model=None, block_size=16, **options)
    return pool_size(config, max_model_len=100, block_bytes=1000, available_bytes=400_999, total_bytes=100_000_000)


def test_the_pool_is_as_large_as_asked():
    assert size(num_blocks=3) == 3
    assert size(kv_cache_bytes=5_999) == 5


def test_by_default_the_pool_takes_a_quarter_of_the_memory_and_no_more_than_its_requests_could_hold():
    assert size() == 100
    assert size(max_num_seqs=2) == 14


def test_a_pool_of_no_blocks_is_refused():
    with pytest.raises(ConfigError, match="1000 bytes"):
        size(kv_cache_bytes=999)


def test_the_context_limit_is_the_models_unless_lowered():
    assert context_limit(None, 100, "m") == 100
    assert context_limit(100, 100, "m") == 100
    with pytest.raises(ConfigError, match="101 is more than m can: 100"):
        context_limit(101, 100, "m")


def test_an_unknown_option_is_refused_with_a_likely_name():
    with pytest.raises(ConfigError, match=r"^unknown option 'blok_size': did you mean block_size\?$"):
        LLM("smollm2-135m", blok_size=3)
    with pytest.raises(ConfigError, match=r"^unknown option 'zzz'; options are model, tokenizer, block_size, "):
        LLM("smollm2-135m", zzz=3)


def test_hash_algorithms_by_name():
    import xxhash

    assert find_hash_function("sha256")(b"a").digest() == hashlib.sha256(b"a").digest()
    assert find_hash_function("xxh3_128")(b"a").digest() == xxhash.xxh3_128(b"a").digest()


def test_a_missing_hash_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="pip install xxhash"):
        find_hash_function("xxh3_128")


def test_a_pool_larger_than_the_machine_is_refused():
    assert size(num_blocks=100_000) == 100_000
    with pytest.raises(ConfigError, match="the machine has"):
        size(num_blocks=100_001)


@pytest.mark.parametrize(
    "options", [{"num_threads": 10**11}, {"block_size": 2**62}, {"enable_prefix_caching": "no"}, {"fast_forward": 1}]
)
def test_options_beyond_sense_are_refused(options):
    with pytest.raises(ConfigError):
        EngineConfig(model=None, **options)
