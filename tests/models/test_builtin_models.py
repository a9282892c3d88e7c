"""The built-in models, real weights, in the default cache folder, so that they are fetched and converted once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from anaphora import LLM, SamplingParams
from anaphora.runtime.architecture import inspect_model
from anaphora.runtime.fast_forward import FastForward, make_forward
from anaphora.runtime.model import LoadedModel, load_model
from anaphora.runtime.sources import builtin, default_cache_dir
from anaphora.runtime.sources.converted import recorded_digests
from anaphora.runtime.sources.digests import file_digest
from anaphora.runtime.sources.fetch import fetch_gguf
from anaphora.runtime.sources.progress import Progress
from anaphora.runtime.sources.resolve import resolve_model

pytestmark = pytest.mark.models

PROMPT = "The capital of France is"
SAMPLES = ("", " ", "Hello world", "naïve café 日本語 🙂\t\n\n  x=y", "def f(a, b):\n    return a + b\n")


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m", dtype="float32")


def greedy(module: torch.nn.Module, token_ids: list[int], count: int) -> list[int]:
    output = module.generate(  # type: ignore[operator]
        torch.tensor([token_ids]), do_sample=False, max_new_tokens=count, min_new_tokens=count
    )
    return output[0, len(token_ids) :].tolist()  # type: ignore[no-any-return]


def test_smollm2_is_what_it_says(smollm2: LoadedModel) -> None:
    assert (smollm2.name, smollm2.vocab_size, smollm2.max_model_len) == ("smollm2-135m", 49152, 8192)
    assert smollm2.eos_token_ids == {2}
    assert smollm2.identity["architecture"] == "LlamaForCausalLM"
    assert smollm2.identity["rope"] == '{"rope_parameters":{"rope_theta":100000.0,"rope_type":"default"}}'


def test_smollm2_goes_on_as_the_gguf_file_says(smollm2: LoadedModel, tmp_path: Path) -> None:
    """The converted weights are those that `transformers` computes from the file itself, and so is the text."""
    gguf = fetch_gguf(builtin.SMOLLM2_135M, tmp_path, Progress(False))
    direct = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    converted = smollm2.module.state_dict()
    assert all(torch.equal(converted[name], tensor) for name, tensor in direct.state_dict().items())
    assert smollm2.tokenizer is not None
    direct_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf.name)
    for sample in SAMPLES:
        assert smollm2.tokenizer.encode(sample) == direct_tokenizer.encode(sample)
    token_ids = smollm2.tokenizer.encode(PROMPT)
    assert greedy(smollm2.module, token_ids, 4) == greedy(direct, token_ids, 4)


def test_smollm2_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    token_ids = smollm2.tokenizer.encode(PROMPT)
    assert smollm2.tokenizer.decode(greedy(smollm2.module, token_ids, 2)) == " Paris."


def test_smollm2_chats_in_its_template_without_bos(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = tokenizer.encode(text)
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert token_ids[:3] == [1, 9690, 198]
    assert token_ids.count(1) == 3  # one <|im_start|> for each of the three turns
    assert tokenizer.decode(token_ids) == text


def test_smollm2_splits_numbers_as_it_learned_them(smollm2: LoadedModel) -> None:
    """Each digit alone, and the newlines before it together; what `transformers` makes of the file splits those."""
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer.encode("\n\n12")) == ["ĊĊ", "1", "2"]


def test_smollm2_starts_in_seconds_without_converting(smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        pytest.fail("fetched, converted or hashed again")

    for name in ("resolve.fetch_gguf", "resolve.convert_gguf", "digests.file_digest"):
        monkeypatch.setattr(f"anaphora.runtime.sources.{name}", never)
    start = time.process_time()
    again = load_model("smollm2-135m", dtype="float32")
    assert time.process_time() - start < 10
    assert again.identity == smollm2.identity


def test_smollm2s_identity_is_stable(smollm2: LoadedModel) -> None:
    folder = resolve_model("smollm2-135m", default_cache_dir(), Progress(False)).folder
    assert recorded_digests(folder) == {"model.safetensors": file_digest(folder / "model.safetensors")}
    other = load_model("smollm2-135m", dtype="bfloat16").identity
    assert {key for key in other if other[key] != smollm2.identity[key]} == {"dtype"}


def test_gemma3_loads_and_wants_one_bos() -> None:
    loaded = load_model("gemma3-270m", dtype="bfloat16")
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (262144, 32768, {1})
    assert loaded.identity["architecture"] == "Gemma3ForCausalLM"
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template is None
    token_ids = tokenizer.encode(PROMPT)
    assert token_ids[0] == tokenizer.bos_token_id == 2
    assert token_ids.count(2) == 1
    assert tokenizer.decode(token_ids) == "<bos>" + PROMPT
    continuation = tokenizer.decode(greedy(loaded.module, token_ids, 8))
    assert continuation.startswith(" the capital of")


@pytest.mark.parametrize("model", builtin.BUILTIN_MODELS, ids=lambda model: model.name)
def test_the_catalogue_knows_who_has_a_chat_template(
    tokenizer_of: Callable[[str], Any], model: builtin.BuiltinModel
) -> None:
    assert bool(tokenizer_of(model.name).chat_template) == model.has_chat_template


@pytest.fixture(scope="module")
def gemma3_text() -> tuple[LoadedModel, list[int], list[int]]:
    """The model in float32, 1,250 tokens of English, and the 6 that it goes on with by itself."""
    loaded = load_model("gemma3-270m", dtype="float32")
    assert loaded.tokenizer is not None
    letters = [
        f"On day {day}, the keeper of the lighthouse wrote {day * 7 % 31} lines in the log." for day in range(70)
    ]
    prompt = loaded.tokenizer.encode(" ".join(letters))[:1250]
    return loaded, prompt, greedy(loaded.module, prompt, 6)


def test_gemma3_sees_beyond_its_window_as_transformers_does(
    gemma3_text: tuple[LoadedModel, list[int], list[int]],
) -> None:
    """Cold in chunks of 301 tokens, then found again; every window of 512 tokens has been passed."""
    loaded, prompt, expected = gemma3_text
    assert len(prompt) == 1250
    llm = LLM(loaded.module, num_blocks=700, max_num_batched_tokens=301, max_model_len=2048)
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    with torch.inference_mode():
        logits = loaded.module(input_ids=torch.tensor([prompt + expected]), use_cache=False).logits[0, 1249:-1]
    right = logits.log_softmax(dim=-1).amax(dim=-1).tolist()
    for num_cached in (0, 1248):
        (output,) = llm.generate([prompt], params)
        (sequence,) = output.outputs
        assert (output.num_cached_tokens, sequence.token_ids) == (num_cached, expected)
        got = [entry[token].logprob for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]
        assert got == pytest.approx(right, abs=1e-3)
    assert [group.num_live_blocks for group in llm.stats().groups] == [0] * 6


def test_gemma3_and_smollm2_decode_in_the_kernels(
    gemma3_text: tuple[LoadedModel, list[int], list[int]], smollm2: LoadedModel
) -> None:
    """Real weights pass the check of every layer at load."""
    pytest.importorskip("numba")
    for loaded in (gemma3_text[0], smollm2):
        forward = make_forward(loaded.module, inspect_model(loaded.module, 2048), fast=True)
        assert isinstance(forward, FastForward)
        assert forward._kernels


def test_gemma3_runs_by_name() -> None:
    llm = LLM("gemma3-270m", num_blocks=64)
    assert llm.engine.max_model_len == 32768
    assert llm.engine.kv_bytes_per_token == (3 * 2 * 256 * 2,) * 6
    (output,) = llm.generate("The capital of France is", SamplingParams(max_tokens=2, temperature=0.0))
    assert output.outputs[0].text == " the capital"
