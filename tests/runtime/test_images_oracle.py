"""Images: every output is what the model gives by itself with `pixel_values`, whatever is cached."""

from __future__ import annotations

import base64
import io
import itertools
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llava import IMAGE, IMAGE_ID, IMAGE_TOKENS, make_tiny_llava, make_tiny_processor, picture, save_tiny_llava

from anaphora import LLM, SamplingParams
from anaphora.core import check_scheduler
from anaphora.errors import InvalidParameterError
from anaphora.runtime.vision import image_digest

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
TOLERANCE = 1e-3
APART = 100 * TOLERANCE
"""What two images' outputs differ by at least, or a test of their isolation proves nothing."""
BLOCK = 8


@pytest.fixture(scope="module")
def module() -> Any:
    torch.set_num_threads(1)
    return make_tiny_llava()


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_tiny_llava()


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_tiny_processor()


def make_llm(module: Any, processor: Any, **options: Any) -> LLM:
    return LLM(module, tokenizer=processor, **({"num_blocks": 128, "block_size": BLOCK} | options))


def ask(llm: LLM, text: str, *images: Any, params: SamplingParams = PARAMS, **options: Any) -> Any:
    (output,) = llm.generate({"prompt": text, "images": list(images)}, params, **options)
    assert output.error is None, output.error
    return output


def right_logprobs(reference: Any, processor: Any, output: Any, text: str, images: Any) -> torch.Tensor:
    """[outputs, vocab] of one plain forward of the model with the images' pixels."""
    given = processor(text=[text], images=list(images) or None, return_tensors="pt")
    assert given["input_ids"][0].tolist() == output.prompt_token_ids
    ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    with torch.inference_mode():
        logits = reference(input_ids=ids, pixel_values=given.get("pixel_values"), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1], dim=-1)


def deviation(reference: Any, processor: Any, output: Any, text: str, *images: Any) -> float:
    right = right_logprobs(reference, processor, output, text, images)
    tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert tokens
    return max(
        abs(entry[token].logprob - float(right[i, token]))
        for i, (token, entry) in enumerate(zip(tokens, entries, strict=True))
    )


TEXTS = {
    "one": ("Look: <image> What is it?", [1]),
    "first": ("<image>", [2]),
    "two in one block": ("ab<image>c<image>d", [1, 2]),
    "side by side": ("abc<image><image>", [3, 4]),
    "the same twice": ("<image> and <image>?", [5, 5]),
    "none": ("Nothing to see here.", []),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("budget", [512, 7, 1])
def test_cold_and_warm_outputs_are_the_models_own(
    module: Any, reference: Any, processor: Any, name: str, budget: int
) -> None:
    text, seeds = TEXTS[name]
    images = [picture(seed) for seed in seeds]
    llm = make_llm(module, processor, max_num_batched_tokens=budget)
    cold = ask(llm, text, *images)
    warm = ask(llm, text, *images)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // BLOCK * BLOCK
    for output in (cold, warm):
        assert deviation(reference, processor, output, text, *images) < TOLERANCE
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert llm.engine._executor.features.num_encoded == len(set(seeds))
    assert llm.engine._executor.features.num_held == 0


def test_the_images_matter(module: Any, reference: Any, processor: Any) -> None:
    """Guard: by the answer to one image, the answer to another is far off."""
    llm = make_llm(module, processor)
    text = "Look: <image> What is it?"
    for mine, other in itertools.permutations([1, 2, 3], 2):
        assert deviation(reference, processor, ask(llm, text, picture(mine)), text, picture(other)) > APART


def test_another_image_misses_from_the_first_block_that_it_touches_and_no_earlier(
    module: Any, reference: Any, processor: Any
) -> None:
    llm = make_llm(module, processor)
    for before in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 2):
        llm.reset_prefix_cache()
        text = "x" * before + "<image>" + "y" * 20
        ask(llm, text, picture(1))
        other = ask(llm, text, picture(2))
        assert other.num_cached_tokens == before // BLOCK * BLOCK
        assert deviation(reference, processor, other, text, picture(2)) < TOLERANCE


def test_text_behind_an_image_may_change_and_text_before_it_may_not(module: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    ask(llm, "abcdefgh<image>" + "y" * 20, picture(1))
    assert ask(llm, "abcdefgh<image>" + "z" * 20, picture(1)).num_cached_tokens == BLOCK + IMAGE_TOKENS
    assert ask(llm, "bbcdefgh<image>" + "y" * 20, picture(1)).num_cached_tokens == 0


def test_the_second_image_is_of_the_key_and_the_order_of_images_too(
    module: Any, reference: Any, processor: Any
) -> None:
    llm = make_llm(module, processor)
    text = "abcd<image>efgh<image>ijklmnopqrst"
    ask(llm, text, picture(1), picture(2))
    changed = ask(llm, text, picture(1), picture(3))
    assert changed.num_cached_tokens == (4 + IMAGE_TOKENS + 4) // BLOCK * BLOCK
    swapped = ask(llm, text, picture(2), picture(1))
    assert swapped.num_cached_tokens == 0
    assert deviation(reference, processor, swapped, text, picture(2), picture(1)) < TOLERANCE


def test_the_image_tokens_without_an_image_are_another_prompt(module: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    ids = ask(llm, "ab<image>cdefgh", picture(1)).prompt_token_ids
    assert ids.count(IMAGE_ID) == IMAGE_TOKENS
    (bare,) = llm.generate([ids], PARAMS)
    assert bare.num_cached_tokens == 0


def test_the_digest_is_that_of_the_format() -> None:
    """Written a second time, from docs/hash-format.md."""
    pixels, processing = torch.arange(12, dtype=torch.float32).view(3, 2, 2) / 8, '["P",{}]'
    message = b"anaphora/image" + b"\x01" + b"\x08\0\0\0" + b'["P",{}]' + b"\x07\0\0\0" + b"float32"
    message += struct.pack("<4I", 3, 3, 2, 2) + struct.pack("<12f", *(number / 8 for number in range(12)))
    assert image_digest(pixels, processing) == sha256(message).hexdigest()
    assert image_digest(pixels.view(2, 3, 2), processing) != sha256(message).hexdigest()


def test_another_processing_of_the_same_image_is_another_image(module: Any, processor: Any) -> None:
    """Also where the pixels come out the same: this image needs no resizing, and the ways to resize differ."""
    prompt = {"prompt": "<image>", "images": [picture(1, 28, 28)]}
    mine, same, other = (
        make_llm(module, each).engine.read_prompt(prompt)
        for each in (processor, make_tiny_processor(), make_tiny_processor(resample=0))
    )
    pixels = [next(iter(prepared.sources.values())).values for prepared in (mine, other)]
    assert torch.equal(*pixels)
    assert mine.extra_keys == same.extra_keys and mine.extra_keys != other.extra_keys
    assert [key.block_index for key in mine.extra_keys] == [0, 1]


def test_images_times_salts_share_with_their_own_only(module: Any, reference: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    text = "ab<image>" + "c" * 22
    seen = set()
    for salt, seed in list(itertools.product((None, "a", "b"), (1, 2))) * 2:
        output = ask(llm, text, picture(seed), cache_salt=salt)
        assert output.num_cached_tokens == (32 if (salt, seed) in seen else 0)
        assert deviation(reference, processor, output, text, picture(seed)) < TOLERANCE
        seen.add((salt, seed))
    assert llm.engine._executor.features.num_encoded == 2


def test_rows_that_have_left_memory_are_made_again_and_not_for_a_hit(
    module: Any, reference: Any, processor: Any
) -> None:
    llm = make_llm(module, processor, feature_cache_bytes=IMAGE_TOKENS * 64 * 4, max_num_batched_tokens=9)
    store, text = llm.engine._executor.features, "ab<image>" + "c" * 20
    engine = llm.engine
    for number in range(4):  # they wait for each other: a budget of 9 tokens is less than one image
        engine.add_request(f"r{number}", {"prompt": text, "images": [picture(number)]}, PARAMS)
    assert store.num_held == 4
    outputs = {}
    while engine.has_unfinished:
        outputs |= {step.request_id: step.output for step in engine.step() if step.output is not None}
        check_scheduler(engine._scheduler)
        assert store.num_bytes <= IMAGE_TOKENS * 64 * 4
    for number in range(4):
        assert deviation(reference, processor, outputs[f"r{number}"], text, picture(number)) < TOLERANCE
    assert store.num_held == 0 and store.num_encoded >= 4
    before = store.num_encoded
    assert ask(llm, text, picture(0)).num_cached_tokens == 32
    assert store.num_encoded == before


def test_preempted_requests_with_images_are_exact(module: Any, reference: Any, processor: Any) -> None:
    llm = make_llm(module, processor, num_blocks=14, max_num_batched_tokens=24, feature_cache_bytes=1)
    engine, params, outputs = llm.engine, SamplingParams(max_tokens=30, temperature=0.0, logprobs=0), {}
    texts = {f"r{number}": "a" * number + "<image>" + "c" * 9 for number in range(4)}
    for number, (request_id, text) in enumerate(texts.items()):
        engine.add_request(request_id, {"prompt": text, "images": [picture(number)]}, params)
    while engine.has_unfinished:
        outputs |= {step.request_id: step.output for step in engine.step() if step.output is not None}
        check_scheduler(engine._scheduler)
    assert engine.stats().counters.num_preemptions > 0
    for number, (request_id, text) in enumerate(texts.items()):
        assert deviation(reference, processor, outputs[request_id], text, picture(number)) < TOLERANCE


def test_an_aborted_or_refused_request_holds_no_image(module: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    store, prompt = llm.engine._executor.features, {"prompt": "<image>", "images": [picture(1)]}
    llm.engine.add_request("a", prompt, PARAMS)
    llm.engine.add_request("b", prompt, PARAMS)
    assert store.num_held == 1
    llm.engine.abort("a")
    assert store.num_held == 1
    llm.engine.abort("b")
    with pytest.raises(InvalidParameterError):
        llm.engine.add_request("c", prompt, PARAMS, priority="high")  # type: ignore[arg-type]
    assert store.num_held == 0


def test_new_weights_of_the_encoder_make_new_rows(processor: Any) -> None:
    module, reference = make_tiny_llava(), make_tiny_llava()
    llm = make_llm(module, processor)
    text = "ab<image>cd"
    ask(llm, text, picture(1))
    name = "model.multi_modal_projector.linear_2.weight"
    changed = {name: module.state_dict()[name] * -2}
    llm.update_weights(changed)
    reference.load_state_dict(changed, strict=False)
    output = ask(llm, text, picture(1))
    assert output.num_cached_tokens == 0
    assert deviation(reference, processor, output, text, picture(1)) < TOLERANCE


def test_choices_and_scores_of_a_prompt_with_an_image(module: Any, reference: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    text = "ab<image>cd"
    output = ask(llm, text, picture(1), params=SamplingParams(n=2, max_tokens=3, seed=1, prompt_logprobs=0))
    assert output.prompt == text and len(output.outputs) == 2
    given = processor(text=[text], images=[picture(1)], return_tensors="pt")
    with torch.inference_mode():
        scores = torch.log_softmax(reference(**given, use_cache=False).logits[0], dim=-1)
    for place, token in enumerate(output.prompt_token_ids[1:]):
        assert abs(output.prompt_logprobs[place + 1][token].logprob - float(scores[place, token])) < TOLERANCE


def test_a_folder_with_a_vision_model_is_loaded_with_its_processor(tmp_path: Path, reference: Any) -> None:
    folder = save_tiny_llava(tmp_path / "llava")
    llm = LLM(str(folder), dtype="float32", num_blocks=64, block_size=BLOCK)
    assert llm.engine.image_token == IMAGE
    assert llm.engine.identity["architecture"] == "LlavaForConditionalGeneration"
    text = "Look: <image> What is it?"
    output = ask(llm, text, picture(1))
    assert deviation(reference, make_tiny_processor(), output, text, picture(1)) < TOLERANCE


def test_a_chat_with_images_is_its_rendered_prompt(module: Any, processor: Any) -> None:
    llm = make_llm(module, processor)
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    data_url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    rendered = ask(llm, "<user>Look: <image>What is it?<assistant>", picture(1))
    for image in (
        {"type": "image", "image": picture(1)},
        {"type": "image", "image": file.getvalue()},
        {"type": "image_url", "image_url": {"url": data_url}},
    ):
        parts = [{"type": "text", "text": "Look: "}, image, {"type": "text", "text": "What is it?"}]
        (output,) = llm.chat([{"role": "user", "content": parts}], PARAMS)
        assert output.prompt_token_ids == rendered.prompt_token_ids
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK
    with pytest.raises(InvalidParameterError, match=r"messages\[0\].content\[0\].image_url must be a data URL"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "https://a.test/b.png"}]}], PARAMS)
