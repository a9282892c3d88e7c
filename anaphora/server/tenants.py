"""Who calls, and with whom they share cached beginnings. Knows keys, tenants and salts; must not know HTTP.

With a key file every tenant has a cache of its own: the salt that the engine sees is
HMAC-SHA256(server secret, domain ‖ client salt), both tagged and length-prefixed. Nobody without the secret can
compute another domain's salt, so no client salt, however chosen, reaches another tenant's blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError
from anaphora.salt_regions import CacheSalt, SaltRegions


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. tenant: None where the server has no key file."""

    tenant: str | None
    is_admin: bool


ANYBODY = Caller(tenant=None, is_admin=True)
"""The caller of a server without a key file."""


class ApiKeys:
    """Callers by key. Holds digests of the keys only."""

    def __init__(self, callers: Iterable[tuple[str, Caller]]) -> None:
        self._callers = [(_digest(key), caller) for key, caller in callers]

    def find(self, key: str) -> Caller | None:
        """The caller of this key. Compares with every key, in constant time each."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    @property
    def tenants(self) -> set[str]:
        return {caller.tenant for _, caller in self._callers if caller.tenant is not None}


def load_api_keys(path: Path) -> ApiKeys:
    """Read a key file: lines of `KEY TENANT` or `KEY TENANT admin` (# begins a comment), or JSON:
    `{"KEY": "TENANT", "KEY2": {"tenant": "TENANT", "admin": true}}`. Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    entries = _json_entries(path, text) if text.lstrip().startswith("{") else _line_entries(path, text)
    if not entries:
        raise ConfigError(f"the key file {path} holds no key: nobody could call the server")
    for number, key in enumerate(entries, start=1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"key {number} of {path} can be sent in no header: use printable ASCII without spaces")
    return ApiKeys(entries.items())


def _line_entries(path: Path, text: str) -> dict[str, Caller]:
    entries: dict[str, Caller] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) not in (2, 3) or fields[2:] not in ([], ["admin"]):
            raise ConfigError(f"line {number} of {path} must be `KEY TENANT` or `KEY TENANT admin`")
        if fields[0] in entries:
            raise ConfigError(f"line {number} of {path} gives a key that an earlier line gives too")
        entries[fields[0]] = Caller(fields[1], is_admin=len(fields) == 3)
    return entries


def _json_entries(path: Path, text: str) -> dict[str, Caller]:
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the key file {path} is not valid JSON: {error}") from error
    entries: dict[str, Caller] = {}
    for number, (key, value) in enumerate(pairs, start=1):
        fields: dict[str, Any] = {"tenant": value} if isinstance(value, str) else dict(_pairs(value))
        tenant, is_admin = fields.pop("tenant", None), fields.pop("admin", False)
        if not key or not isinstance(tenant, str) or not tenant or not isinstance(is_admin, bool) or fields:
            raise ConfigError(f'entry {number} of {path} must be "TENANT" or {{"tenant": "TENANT", "admin": true}}')
        if key in entries:
            raise ConfigError(f"entry {number} of {path} gives a key that an earlier entry gives too")
        entries[key] = Caller(tenant, is_admin)
    return entries


def _pairs(value: object) -> list[tuple[str, Any]]:
    return value if isinstance(value, list) and all(isinstance(pair, tuple) for pair in value) else []


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_secret(secret: bytes) -> None:
    """Raises ConfigError if it is too short to keep tenants apart."""
    if len(secret) < 16:
        raise ConfigError(f"the server secret has {len(secret)} bytes: give at least 16 random ones")


def check_sharing(groups: Iterable[frozenset[str]], api_keys: ApiKeys | None) -> None:
    """Raises ConfigError if groups of tenants that share a cache name tenants that there are not."""
    named = frozenset().union(*groups)
    if api_keys is None and named:
        raise ConfigError("share_cache names tenants, and without a key file there are none: give api_key_file")
    if api_keys is not None and (unknown := named - api_keys.tenants):
        raise ConfigError(f"share_cache names tenants that have no key: {', '.join(sorted(unknown))}")


class CacheDomains:
    """The salt that keeps each tenant's cached beginnings apart.

    secret: at least 16 bytes; equal secrets give equal salts. shared: groups of tenants that have one domain together.
    """

    def __init__(self, secret: bytes, shared: Iterable[frozenset[str]] = ()) -> None:
        check_secret(secret)
        self._secret = secret
        self._epochs: dict[tuple[str, ...], int] = {}  # of domains that were forgotten
        self._shared: Mapping[str, frozenset[str]] = {tenant: group for group in shared for tenant in group}

    def salt(self, caller: Caller, client_salt: CacheSalt | None) -> CacheSalt | None:
        """What the engine is told. Without tenants that is the client's own salt.

        A tenant's regions stand inside its domain: what is before the first one is shared within the domain alone.
        """
        if caller.tenant is None:
            return client_salt
        if not isinstance(client_salt, SaltRegions):
            return self._domain_salt(caller.tenant, client_salt)
        regions = [(start, self._domain_salt(caller.tenant, salt)) for start, salt in client_salt.regions]
        if regions[0][0] > 0:
            regions.insert(0, (0, self._domain_salt(caller.tenant, None)))
        return SaltRegions(regions)

    def forget(self, tenant: str) -> None:
        """From now on the tenant has other salts, and so has who shares its domain: what is cached is found no more."""
        domain = self._domain(tenant)
        self._epochs[domain] = self._epochs.get(domain, 0) + 1

    def _domain(self, tenant: str) -> tuple[str, ...]:
        group = self._shared.get(tenant)
        return ("tenant", tenant) if group is None else ("shared", *sorted(group))

    def _domain_salt(self, tenant: str, client_salt: str | None) -> str:
        domain = self._domain(tenant)
        message = _packed(domain) + _packed([] if client_salt is None else [client_salt])
        if epoch := self._epochs.get(domain):
            message += epoch.to_bytes(8)
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def _packed(texts: Sequence[str]) -> bytes:
    """Unambiguous bytes: how many, then each with its length before it."""
    fields = [text.encode("utf-8") for text in texts]
    return len(fields).to_bytes(4) + b"".join(len(field).to_bytes(8) + field for field in fields)
