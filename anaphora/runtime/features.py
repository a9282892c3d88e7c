"""Rows that stand in a prompt instead of token embeddings: where they come from, and which of them a step needs.

Knows digests and tensors; must not know images, requests' states or who runs next. A source is held from the time that
its request comes in until it ends; rows that an encoder made of it are kept as long as there is room, held or not, and
made again when they are needed and gone.

    source held: rows given by the caller --------------------------------> rows
                 pixels --encoder, once, if a step needs them--> kept ----> rows
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from anaphora.core.plan import FeatureSpan, ScheduledRequest
from anaphora.runtime.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows [n, hidden] as the model's forward takes them."""

    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image as the model's processor gives it, without a batch dimension."""

    values: torch.Tensor


Source = GivenRows | Pixels


def little_endian(tensor: torch.Tensor) -> bytes:
    """A tensor's numbers in order, each little-endian, whatever the machine."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big":
        data = data.reshape(-1, tensor.element_size())[:, ::-1]
    return bytes(data.tobytes())


InputRows = tuple[tuple[int, torch.Tensor], ...]
"""Rows [n, hidden] and the packed token that each run of them begins at."""


class FeatureStore:
    """Sources by digest, counted, and the rows that were made of pixels, least recently used first out.

    encode: pixels to rows [n, hidden]; None if the model reads no images. max_bytes: of the rows that are kept; those
    that a step needs are there for that step, however many they are. num_encoded: images that the encoder has seen.
    """

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor] | None, max_bytes: int) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._weights = ""
        self._sources: dict[str, tuple[Source, int]] = {}
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self.num_bytes = 0
        self.num_encoded = 0

    @property
    def num_held(self) -> int:
        """Sources of requests that are alive."""
        return len(self._sources)

    def hold(self, sources: Mapping[str, Source]) -> None:
        """One more request with these sources."""
        for digest, source in sources.items():
            known, num_users = self._sources.get(digest, (source, 0))
            self._sources[digest] = known, num_users + 1

    def release(self, digests: Iterable[str]) -> None:
        """One request less."""
        for digest in digests:
            source, num_users = self._sources.pop(digest)
            if num_users > 1:
                self._sources[digest] = source, num_users - 1

    def rows(self, span: FeatureSpan) -> torch.Tensor:
        """The rows of a span of a request that is alive. Raises RuntimeError if they do not fill it."""
        source, _ = self._sources[span.digest]
        rows = source.rows if isinstance(source, GivenRows) else self._encoded(span.digest, source.values)
        if rows.shape[0] != span.length:
            raise RuntimeError(f"the model made {rows.shape[0]} rows for {span.length} positions")
        return rows

    def follow(self, weights: str) -> None:
        """Forget the rows that other weights have made. weights: anything that names those in use now."""
        if weights != self._weights:
            self._weights = weights
            self._kept.clear()
            self.num_bytes = 0

    def _encoded(self, digest: str, pixels: torch.Tensor) -> torch.Tensor:
        rows = self._kept.get(digest)
        if rows is not None:
            self._kept.move_to_end(digest)
            return rows
        if self._encode is None:
            raise RuntimeError("this executor was made without an encoder of images")
        rows = self._encode(pixels)
        self.num_encoded += 1
        self._kept[digest] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return rows


def input_rows(
    scheduled: Sequence[ScheduledRequest],
    features: Sequence[tuple[FeatureSpan, ...]],
    inputs: StepInputs,
    store: FeatureStore,
) -> InputRows:
    """What of the features of each scheduled request this step computes.

    A step after a request's last feature costs nothing here, however many there were.
    """
    found = []
    for request, spans, (packed, _) in zip(scheduled, features, inputs.spans, strict=True):
        if not spans or request.start >= spans[-1].stop:
            continue
        stop = request.start + len(request.token_ids)
        for span in spans:
            first, last = max(span.start, request.start), min(span.stop, stop)
            if first < last:
                rows = store.rows(span)[first - span.start : last - span.start]
                found.append((packed + first - request.start, rows))
    return tuple(found)
