"""Salts that begin somewhere inside a prompt: a public beginning that all share, and a private rest. Plain data.

Knows positions and texts; must not know blocks, tenants or bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anaphora.errors import InvalidParameterError

MAX_REGIONS = 64


@dataclass(frozen=True, slots=True, init=False)
class SaltRegions:
    """`SaltRegions([(0, "team"), (512, "alice")])`: from each start token on, its salt counts besides those before it.

    A salt counts from the block on that contains its start: cached blocks are shared whole. Tokens before the first
    start are shared with everybody. Starts ascend strictly and may lie beyond the prompt, in what is generated.
    Raises InvalidParameterError; at most MAX_REGIONS.
    """

    regions: tuple[tuple[int, str], ...]

    def __init__(self, regions: Iterable[tuple[int, str]]) -> None:
        if isinstance(regions, str | bytes) or not isinstance(regions, Iterable):
            raise InvalidParameterError(f"cache_salt regions must be a list of (start, salt), got {regions!r}")
        checked: list[tuple[int, str]] = []
        for region in regions:
            if len(checked) == MAX_REGIONS:
                raise InvalidParameterError(f"cache_salt has more than {MAX_REGIONS} regions: begin fewer")
            if not isinstance(region, tuple | list) or len(region) != 2:
                raise InvalidParameterError(f"a region of cache_salt must be (start, salt), got {region!r}")
            start, salt = region
            if type(start) is not int or start < 0:  # True and 0.0 equal integers and mean something else
                raise InvalidParameterError(f"a region of cache_salt must start at a token, 0 or later, got {start!r}")
            if checked and start <= checked[-1][0]:
                raise InvalidParameterError(
                    f"regions of cache_salt must start one after the other, got {start} after {checked[-1][0]}"
                )
            check_salt(salt)
            checked.append((start, str(salt)))
        if not checked:
            raise InvalidParameterError("cache_salt has no regions: give None to share with all requests without one")
        object.__setattr__(self, "regions", tuple(checked))


CacheSalt = str | SaltRegions
"""One salt for the whole request, or salts by region."""


def check_salt(salt: object) -> None:
    """Raises InvalidParameterError if this is no salt: a non-empty text that UTF-8 can encode."""
    if not isinstance(salt, str) or not salt:
        raise InvalidParameterError(f"cache_salt must be a non-empty string or None, got {salt!r}")
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(f"cache_salt must be valid Unicode: {error.reason} at {error.start}") from None
