"""Images behind http(s) URLs that clients name: fetched from public addresses only, inside limits.

A server that follows a client's URL acts inside the network that it stands in. So every name is resolved once, every
address that it has must be public, and the connection goes to the very address that was checked: a name that changes
its mind between the check and the connection gains nothing. Redirects go through the same check. Blocking: for a
worker thread. Knows HTTP; must not know images.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from anaphora.engine.multimodal import NamedImage
from anaphora.errors import InvalidParameterError
from anaphora.server.config import ServerConfig
from anaphora.server.name_lookup import NameLookup

MAX_REDIRECTS = 3
_CHUNK_BYTES = 64 * 1024
_MAX_URL_CHARS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}


def is_public(address: str) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local, shared, multicast, reserved.

    An IPv6 address that stands for an IPv4 address (mapped, 6to4, Teredo, NAT64) is never: what it stands for would
    have to be looked into, and nobody serves images there.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        stands_for_another = parsed.ipv4_mapped or parsed.sixtofour or parsed.teredo or parsed in _NAT64
        if stands_for_another or not any(parsed in network for network in _GLOBAL_UNICAST):
            return False
    elif any(parsed in network for network in _SPECIAL):
        return False
    return parsed.is_global and not parsed.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("192.88.99.0/24"))  # metadata; 6to4 relays
_GLOBAL_UNICAST = (ipaddress.ip_network("2000::/3"),)


class RemoteImages:
    """Fetches the images of one request, within the limits of a server. Its time begins here.

    is_allowed, clock: for tests.
    """

    def __init__(
        self,
        config: ServerConfig,
        names: NameLookup,
        *,
        is_allowed: Callable[[str], bool] = is_public,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = config.remote_image_timeout_s
        self._max_bytes = config.max_remote_image_bytes
        self._names = names
        self._is_allowed = is_allowed
        self._clock = clock
        self._until = clock() + config.remote_image_timeout_s  # of all images together

    def fetch(self, image: NamedImage) -> bytes:
        """What a URL holds. Raises InvalidParameterError, which says nothing of addresses or of what answered there."""
        field, url = image.field, str(image.image)
        for _ in range(MAX_REDIRECTS + 1):
            found = self._get(url, field, self._until)
            if isinstance(found, bytes):
                return found
            url = found
        raise InvalidParameterError(f"{field} is redirected more than {MAX_REDIRECTS} times")

    def _get(self, url: str, field: str, until: float) -> bytes | str:
        """The body, or the URL that it redirects to."""
        parts, host, port = _split(url, field)
        connection = self._connect(parts.scheme, host, port, field, until)
        watch = _shut_down_later(connection.sock, self._left_s(field, until))
        try:
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"accept": "image/*", "accept-encoding": "identity"})
            reply = connection.getresponse()
            location = reply.getheader("location")
            if reply.status in _REDIRECTS and location:
                return urljoin(url, location)
            if reply.status != 200:
                raise InvalidParameterError(f"{field} cannot be fetched: the other server has no such image")
            return self._body(reply, field, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, InvalidParameterError):
                raise
            self._left_s(field, until)
            raise _unreachable(field) from None
        finally:
            watch.cancel()
            connection.close()

    def _connect(self, scheme: str, host: str, port: int, field: str, until: float) -> http.client.HTTPConnection:
        try:
            addresses = self._names.find(host, port, self._left_s(field, until))
        except (OSError, UnicodeError):
            self._left_s(field, until)
            raise _unreachable(field) from None
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise InvalidParameterError(f"{field} is not at a public address: send the image as a data URL")
        left_s = self._left_s(field, until)
        connection = http.client.HTTPConnection(host, port, timeout=left_s)
        try:
            connection.sock = plain = socket.create_connection((addresses[0], port), timeout=left_s)
            if scheme == "https":  # whose first bytes come later, where their time ends
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        except (OSError, UnicodeError, ValueError):
            connection.close()
            raise _unreachable(field) from None
        return connection

    def _body(self, reply: http.client.HTTPResponse, field: str, until: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            piece = reply.read1(_CHUNK_BYTES)
            if not piece:
                self._left_s(field, until)  # or it is our own end of the connection
                return b"".join(pieces)
            size += len(piece)
            if size > self._max_bytes:
                raise InvalidParameterError(
                    f"{field} is larger than {self._max_bytes:,} bytes (max_remote_image_bytes)"
                )
            self._left_s(field, until)
            pieces.append(piece)

    def _left_s(self, field: str, until: float) -> float:
        left_s = until - self._clock()
        if left_s <= 0:
            raise InvalidParameterError(f"{field} could not be fetched within {self._timeout_s:g} s")
        return left_s


def _shut_down_later(other_end: socket.socket, left_s: float) -> threading.Timer:
    """End a connection when its time is over: a server that sends a byte now and then never runs into a time-out."""

    def shut_down() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(other_end, socket.SHUT_RDWR)  # below TLS, whose state another thread is using

    timer = threading.Timer(left_s, shut_down)
    timer.daemon = True
    timer.start()
    return timer


def _split(url: str, field: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= _MAX_URL_CHARS
    if parts.scheme not in _PORTS or not host or not plain or parts.username is not None or port == 0:
        raise InvalidParameterError(f"{field} must be a data URL, or an http or https URL without a user")
    return parts, host, port or _PORTS[parts.scheme]


def _unreachable(field: str) -> InvalidParameterError:
    return InvalidParameterError(f"{field} cannot be fetched: the other server does not answer")
