"""Images in chat messages: found, taken out, and named, so that an error can say which one it was.

Knows OpenAI's and `transformers`' shapes of content parts, and data URLs; must not know pixels.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anaphora.engine.capabilities import Capabilities
from anaphora.engine.chat_template import Message
from anaphora.engine.multimodal import NamedImage, PreparedPrompt
from anaphora.errors import InvalidParameterError

_DATA_URL = re.compile(r"data:image/[a-zA-Z0-9.+-]+(?:;[a-zA-Z0-9=.+-]+)*;base64,")
_IMAGE_TYPES = ("image", "image_url")


def as_parts(messages: Sequence[Message]) -> list[Message]:
    """Every content as a list of parts: the templates of models that read images walk through those, and some of them
    show nothing of a content that is a string."""
    return [
        {**message, "content": [{"type": "text", "text": content}] if content else []}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def take_images(messages: Sequence[Message], field: str = "messages") -> tuple[list[Message], list[NamedImage]]:
    """The messages with nothing but `{"type": "image"}` where an image stands, and the images in order.

    Parts: `{"type": "image_url", "image_url": {"url": ...}}`, or `{"type": "image", "image": ...}` with a file's bytes
    or a PIL.Image. A URL that is no data URL stays one. Raises InvalidParameterError.
    """
    images: list[NamedImage] = []
    done: list[Message] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            path = f"{field}[{number}].content"
            message = {**message, "content": [_take(part, f"{path}[{i}]", images) for i, part in enumerate(content)]}
        done.append(message)
    return done, images


def without_images(messages: Sequence[Message]) -> Sequence[Message]:
    """The same, for a model that reads text only. Raises InvalidParameterError if there is an image in them."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        _, images = take_images(messages)
        if images:
            raise InvalidParameterError(f"{images[0].field} is an image, and this model reads text only")
    return messages


def _take(part: Any, path: str, images: list[NamedImage]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _IMAGE_TYPES:
        return part
    if kind == "image":
        name, image = f"{path}.image", part.get("image")
    else:
        name, image = f"{path}.image_url", part.get("image_url")
        if isinstance(image, Mapping):
            name, image = f"{name}.url", image.get("url")
        if not isinstance(image, str):
            raise InvalidParameterError(f'{name} must be {{"url": "data:image/...;base64,..."}}')
        if image[:5].lower() == "data:":
            image = decode_data_url(image, name)
    images.append(NamedImage(name, image))
    return {"type": "image"}


def decode_data_url(url: str, field: str) -> bytes:
    """The bytes in a base64 data URL of an image. Raises InvalidParameterError."""
    head = _DATA_URL.match(url)
    if head is None:
        raise InvalidParameterError(f"{field} must begin with data:image/TYPE;base64, and go on in base64")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(f"{field} is not valid base64 ({error}): send the whole file again") from None


def chat_prompt(
    engine: Capabilities,
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    fetch: Callable[[NamedImage], bytes] | None = None,
) -> PreparedPrompt:
    """A conversation of a model that reads images, ready for the engine. Slow, and allowed on any thread.

    render: by the chat template. A BOS is added where the template has put none, as its own processor would. fetch:
    gets an image of another URL; None refuses those. Raises InvalidParameterError, and what `read_prompt` raises.
    """
    messages, images = take_images(messages)
    engine.check_num_images(len(images), "messages")
    given: list[NamedImage] = []
    for image in images:
        if isinstance(image.image, str):
            if fetch is None:
                raise InvalidParameterError(f"{image.field} must be a data URL: images are not fetched from elsewhere")
            image = NamedImage(image.field, fetch(image))
        given.append(image)
    text = render(as_parts(messages))
    bos = getattr(engine.tokenizer, "bos_token", None)
    return engine.read_prompt({"prompt": text, "images": given}, add_special_tokens=not (bos and text.startswith(bos)))
