"""Bytes to pixels, inside limits. Knows Pillow and file formats; must not know models.

Nothing is decoded before the header has said how large it will be: a small file may hold a very large image.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

from anaphora.errors import InvalidParameterError, UnsupportedModelError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDE_RATIO = 100
"""Processors scale the shorter side to some hundred pixels and the longer one with it, before they cut it off: an image
of one pixel by ten million would become one of billions."""
_NO_RANGE = ("I", "F", "La", "RGBa")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """max_images: in one prompt. max_bytes: of one file. max_pixels: width times height of one image."""

    max_images: int
    max_bytes: int
    max_pixels: int


def open_image(image: object, limits: ImageLimits, field: str) -> Any:
    """A file's bytes, or a `PIL.Image`, as an RGB image, upright; of an animation the first frame.

    field: what the caller calls it. Raises InvalidParameterError.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise UnsupportedModelError("images need the package Pillow: pip install pillow") from error
    if isinstance(image, bytes | bytearray):
        if len(image) > limits.max_bytes:
            raise InvalidParameterError(
                f"{field} has {len(image):,} bytes, at most {limits.max_bytes:,} are allowed (max_image_bytes)"
            )
    elif not isinstance(image, Image.Image):
        raise InvalidParameterError(
            f"{field} must be the bytes of an image file or a PIL.Image, got {type(image).__name__}"
        )
    try:
        opened = image if isinstance(image, Image.Image) else Image.open(io.BytesIO(image), formats=FORMATS)
        _check_size(opened.size, limits, field)
        if opened.mode in _NO_RANGE:
            raise InvalidParameterError(
                f"{field} has the mode {opened.mode}, whose white is not known: convert it to RGB"
            )
        upright = ImageOps.exif_transpose(opened)
        if upright.mode.startswith("I;16"):  # or everything beyond 255 of 65,535 would be white
            upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return upright.convert("RGB")
    except UnidentifiedImageError:
        raise InvalidParameterError(f"{field} is no image that can be read: give {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):  # the first where warnings are errors
        raise InvalidParameterError(
            f"{field} decodes to far more pixels than the {limits.max_pixels:,} that are allowed (max_image_pixels)"
        ) from None
    except InvalidParameterError:
        raise
    except (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, EOFError, TypeError, struct.error) as error:
        raise InvalidParameterError(f"{field} is broken or cut off ({error}): send the file again") from None


def _check_size(size: tuple[int, int], limits: ImageLimits, field: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidParameterError(f"{field} is {width} x {height} pixels: give an image that has some")
    if width * height > limits.max_pixels:
        raise InvalidParameterError(
            f"{field} has {width} x {height} pixels, at most {limits.max_pixels:,} are allowed (max_image_pixels): "
            "make it smaller"
        )
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise InvalidParameterError(
            f"{field} has {width} x {height} pixels, at most {MAX_SIDE_RATIO} times as many one way as the other are "
            "allowed: crop it"
        )
