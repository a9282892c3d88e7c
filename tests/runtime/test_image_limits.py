"""Images that cannot be read, or are too many or too large, are refused by name; nothing of the request is kept."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_llama import make_tiny_llama
from tiny_llava import make_tiny_llava, make_tiny_processor, picture

from anaphora import LLM, SamplingParams
from anaphora.errors import InvalidParameterError, PromptTooLongError, RequestError
from anaphora.runtime.vision_images import ImageLimits, open_image


def encoded(image: Any, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it has so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


PNG = encoded(picture(1))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        make_tiny_llava(),
        tokenizer=make_tiny_processor(),
        num_blocks=32,
        max_images=2,
        max_image_bytes=20_000,
        max_image_pixels=10_000,
    )


@pytest.mark.parametrize(
    ("text", "images", "said"),
    [
        ("<image>", [], r"images must be as many as .* 0 images, 1 placeholders"),
        ("no place", [PNG], r"1 images, 0 placeholders"),
        ("<image>" * 3, [PNG] * 3, r"images has 3 entries, at most 2 are allowed \(max_images\)"),
        ("<image>", "file.png", r"images must be a list of images, got str"),
        ("<image>", [None], r"images\[0\] must be the bytes of an image file or a PIL.Image, got NoneType"),
        ("<image><image>", [PNG, b"GIF89a"], r"images\[1\] "),
        ("<image>", [b"not an image"], r"images\[0\] is no image that can be read"),
        ("<image>", [PNG[:60]], r"images\[0\] is broken or cut off"),
        ("<image>", [b"\0" * 20_001], r"images\[0\] has 20,001 bytes, at most 20,000"),
        ("<image>", [picture(1, 101, 100)], r"images\[0\] has 101 x 100 pixels, at most 10,000"),
        ("<image>", [encoded(picture(1, 400, 400))], r"images\[0\] has 400 x 400 pixels"),
        ("<image>", [bomb(9_000, 9_000)], r"images\[0\] has 9000 x 9000 pixels"),
        ("<image>", [bomb(60_000, 60_000)], r"images\[0\] decodes to far more pixels"),
        ("<image>", [encoded(picture(1, 101, 1))], r"images\[0\] has 101 x 1 pixels, at most 100 times"),
        ("<image>", [Image.new("L", (1, 9_999))], r"images\[0\] has 1 x 9999 pixels, at most 100 times"),
        ("<image>", [Image.new("F", (30, 30))], r"images\[0\] has the mode F, whose white is not known: convert"),
        (None, [PNG], r"prompt must be text where there are images, got NoneType"),
        ([1, 2], [PNG], r"prompt must be text where there are images, got list"),
        ("\ud800<image>", [PNG], r"not valid Unicode"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(llm: LLM, text: Any, images: Any, said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        llm.generate({"prompt": text, "images": images})
    assert not llm.engine.has_unfinished
    assert llm.engine._executor.features.num_held == 0


@pytest.mark.parametrize("prompt", [{}, {"images": [PNG], "prompt": "<image>", "mode": 1}, {"prompt": "a"}])
def test_a_dict_of_other_fields_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a prompt that is a dict must have"):
        llm.generate(prompt)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_format_is_read_as_the_image_that_it_holds(llm: LLM, kind: str) -> None:
    data = encoded(picture(1), kind)
    as_file = llm.engine.read_prompt({"prompt": "<image>", "images": [data]})
    as_image = llm.engine.read_prompt({"prompt": "<image>", "images": [Image.open(io.BytesIO(data))]})
    assert as_file.extra_keys == as_image.extra_keys


def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off(llm: LLM) -> None:
    eight = picture(1).convert("L")
    sixteen = Image.fromarray(np.asarray(eight).astype(np.uint16) * 256 + 77)
    prompts = [llm.engine.read_prompt({"prompt": "<image>", "images": [encoded(one)]}) for one in (eight, sixteen)]
    assert prompts[0].extra_keys == prompts[1].extra_keys


def test_images_are_opened_without_a_change_to_what_warnings_do(llm: LLM) -> None:
    """Warning filters are of the whole process: two threads that change them for a while leave them changed."""
    before, seen = list(warnings.filters), []
    opened = Image.open

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(list(warnings.filters))
        return opened(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image, "open", watched)
        open_image(PNG, ImageLimits(1, 20_000, 10_000), "image")
    assert seen == [before]


def test_an_image_lies_as_its_file_says(llm: LLM) -> None:
    """A camera writes the rotation beside the pixels."""
    turned = picture(1).transpose(Image.Transpose.ROTATE_90)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be seen, turn it back by 90 degrees
    turned.save(file, "PNG", exif=exif)
    as_file = llm.engine.read_prompt({"prompt": "<image>", "images": [file.getvalue()]})
    upright = llm.engine.read_prompt({"prompt": "<image>", "images": [picture(1)]})
    assert as_file.extra_keys == upright.extra_keys


def test_a_model_without_an_encoder_reads_no_images() -> None:
    llm = LLM(make_tiny_llama(), num_blocks=16)
    with pytest.raises(InvalidParameterError, match="images are not read by this model"):
        llm.generate({"prompt": "a", "images": [PNG]})
    assert llm.engine.image_token is None


def test_a_prompt_that_its_images_make_too_long_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate({"prompt": "<image><image>" + "a" * 1000, "images": [PNG, PNG]}, SamplingParams(max_tokens=1))
    assert issubclass(PromptTooLongError, RequestError)
