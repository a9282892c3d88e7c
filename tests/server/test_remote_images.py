"""Images by URL: from public addresses only, also after redirects, at the very address that was checked, in limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anaphora.engine.multimodal import NamedImage
from anaphora.errors import InvalidParameterError
from anaphora.server.config import ServerConfig
from anaphora.server.image_fetches import ImageFetches
from anaphora.server.name_lookup import NameLookup
from anaphora.server.remote_images import MAX_REDIRECTS, RemoteImages, is_public

Site = tuple[int, list[str]]
"""A port, and the hosts that were asked for there."""

PUBLIC, LOCAL = "93.184.216.34", "127.0.0.1"


class Pages(BaseHTTPRequestHandler):
    hosts: list[str]

    def do_GET(self) -> None:
        self.hosts.append(self.headers["host"])
        kind, _, rest = self.path.strip("/").partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("location", "/to/" if not rest else rest.replace("~", "/"))
            self.end_headers()
        elif kind == "image":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * int(rest))
        elif kind == "trickle":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
        elif kind == "head":  # never a whole line
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    hosts: list[str] = []
    server = ThreadingHTTPServer((LOCAL, 0), type("Handler", (Pages,), {"hosts": hosts}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server.server_address[1], hosts
    server.shutdown()
    server.server_close()


def remote(names: dict[str, list[str]], *, allowed: Callable[[str], bool] | None = None, **limits: Any) -> RemoteImages:
    """Resolves names by a table; the test's own server counts as public."""
    config = ServerConfig(allow_remote_images=True, **limits)
    return RemoteImages(
        config,
        NameLookup(lambda host, port: names[host]),
        is_allowed=allowed or (lambda address: address == LOCAL),
    )


def fetch(images: RemoteImages, url: str) -> bytes:
    return images.fetch(NamedImage("image_url", url))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        *(
            (address, False)
            for address in (
                "127.0.0.1",
                "127.8.8.8",
                "0.0.0.0",
                "10.1.2.3",
                "172.16.0.1",
                "192.168.1.1",
                "169.254.169.254",
                "100.64.0.1",
                "100.100.100.200",
                "192.0.0.192",
                "224.0.0.1",
                "240.0.0.1",
                "255.255.255.255",
                "198.18.0.1",
                "::1",
                "::",
                "fe80::1",
                "fe80::1%eth0",
                "fc00::1",
                "fd00:ec2::254",
                "ff02::1",
                "::ffff:127.0.0.1",
                "::ffff:93.184.216.34",
                "64:ff9b::a9fe:a9fe",
                "2002:7f00:1::",
                "2001:0:4136:e378:8000:63bf:3fff:fdd2",
                "2001:db8::1",
                "::7f00:1",
                "nonsense",
                "",
            )
        ),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_an_image_is_fetched_from_the_address_that_was_checked(site: Site) -> None:
    port, hosts = site
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return [LOCAL] if len(asked) == 1 else ["10.0.0.1"]  # a second look would find another one

    images = RemoteImages(ServerConfig(), NameLookup(resolve), is_allowed=lambda address: address == LOCAL)
    assert fetch(images, f"http://example.test:{port}/image/5") == b"xxxxx"
    assert asked == ["example.test"] and hosts == [f"example.test:{port}"]


@pytest.mark.parametrize("addresses", [["10.0.0.1"], [LOCAL, "10.0.0.1"], []])
def test_a_name_with_any_address_that_is_not_public_is_refused(site: Site, addresses: list[str]) -> None:
    port, hosts = site
    with pytest.raises(InvalidParameterError, match="not at a public address"):
        fetch(remote({"a.test": addresses}), f"http://a.test:{port}/image/5")
    assert hosts == []


def test_the_default_refuses_this_machine(site: Site) -> None:
    port, hosts = site
    images = RemoteImages(ServerConfig(allow_remote_images=True), NameLookup())
    for host in ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0"):
        with pytest.raises(InvalidParameterError):
            fetch(images, f"http://{host}:{port}/image/5")
    assert hosts == []


def test_a_redirect_is_checked_like_a_url(site: Site) -> None:
    port, hosts = site
    names = {"a.test": [LOCAL], "inside.test": ["192.168.0.1"]}
    assert fetch(remote(names), f"http://a.test:{port}/to/~image~3") == b"xxx"
    for target in (f"http:~~inside.test:{port}~image~3", "http:~~169.254.169.254~latest"):
        with pytest.raises(InvalidParameterError, match="not at a public address"):
            fetch(remote(names | {"169.254.169.254": ["169.254.169.254"]}), f"http://a.test:{port}/to/{target}")
    with pytest.raises(InvalidParameterError, match="must be a data URL"):
        fetch(remote(names), f"http://a.test:{port}/to/file:~~~etc~passwd")
    hosts.clear()
    with pytest.raises(InvalidParameterError, match="redirected more than"):
        fetch(remote(names), f"http://a.test:{port}/to/")
    assert len(hosts) == MAX_REDIRECTS + 1


@pytest.mark.timing
def test_size_and_time_have_ends(site: Site) -> None:
    port, _ = site
    names = {"a.test": [LOCAL]}
    assert len(fetch(remote(names, max_remote_image_bytes=1000), f"http://a.test:{port}/image/1000")) == 1000
    with pytest.raises(InvalidParameterError, match="larger than 1,000 bytes"):
        fetch(remote(names, max_remote_image_bytes=1000), f"http://a.test:{port}/image/1001")
    with pytest.raises(InvalidParameterError, match=r"within 0.2 s"):
        fetch(remote(names, remote_image_timeout_s=0.2), f"http://a.test:{port}/trickle")
    begin_s = time.monotonic()
    with pytest.raises(InvalidParameterError, match=r"within 0.2 s"):
        fetch(remote(names, remote_image_timeout_s=0.2), f"http://a.test:{port}/head")
    assert time.monotonic() - begin_s < 2.5  # of the five seconds that it would go on


def test_the_time_of_a_request_begins_before_its_first_image() -> None:
    now = [5.0]
    config = ServerConfig(allow_remote_images=True, remote_image_timeout_s=2.0)
    images = RemoteImages(config, NameLookup(lambda host, port: [LOCAL]), clock=lambda: now[0])
    now[0] = 7.0  # it has waited for a thread
    with pytest.raises(InvalidParameterError, match="could not be fetched within 2 s"):
        fetch(images, "http://a.test/x")


def test_so_many_are_fetched_at_a_time_and_others_after_them() -> None:
    over, begun = threading.Event(), threading.Barrier(3)
    running: list[str] = []

    def fetching(image: NamedImage) -> bytes:
        running.append(image.field)
        if len(running) <= 2:
            begun.wait(10)
            over.wait(10)
        return b"x"

    async def main() -> None:
        fetches = ImageFetches(ServerConfig(max_image_fetches=2), begin=lambda: fetching)
        tasks = [asyncio.create_task(fetches.fetch([NamedImage(str(i), "http://a")])) for i in range(4)]
        await asyncio.to_thread(begun.wait, 10)
        assert len(running) == 2
        tasks[2].cancel()  # a client that goes away while it waits
        await asyncio.wait([tasks[2]])
        over.set()
        assert [await tasks[i] for i in (0, 1, 3)] == [{"0": b"x"}, {"1": b"x"}, {"3": b"x"}]
        assert running == ["0", "1", "3"]
        fetches.stop()

    asyncio.run(main())


@pytest.fixture
def slow_names() -> Iterator[Callable[[str, int], list[str]]]:
    """A resolver that answers when the test is over."""
    over = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        over.wait(10)
        return [LOCAL]

    yield resolve
    over.set()


@pytest.mark.timing
def test_a_name_that_is_not_found_in_time_holds_nobody(slow_names: Callable[[str, int], list[str]]) -> None:
    config = ServerConfig(allow_remote_images=True, remote_image_timeout_s=0.2)
    begin_s = time.monotonic()
    with pytest.raises(InvalidParameterError, match=r"within 0.2 s"):
        fetch(RemoteImages(config, NameLookup(slow_names)), "http://a.test/x")
    assert time.monotonic() - begin_s < 2.5  # of the ten seconds that the resolver takes


def test_look_ups_that_hang_are_few(slow_names: Callable[[str, int], list[str]]) -> None:
    hung: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        hung.append(host)
        return slow_names(host, port)

    names = NameLookup(resolve, max_pending=2)
    for name in ("a", "b", "c", "d"):
        with pytest.raises(TimeoutError):
            names.find(name, 80, 0.05)
    assert hung == ["a", "b"]


def test_of_one_server_sixteen_look_ups_hang_at_most(slow_names: Callable[[str, int], list[str]]) -> None:
    hung: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        hung.append(host)
        return slow_names(host, port)

    names = NameLookup(resolve)
    for number in range(18):
        with pytest.raises(TimeoutError):
            names.find(str(number), 80, 0.01)
    deadline = time.monotonic() + 10
    while len(hung) < 16 and time.monotonic() < deadline:  # their threads may begin late
        time.sleep(0.01)
    assert sorted(hung, key=int) == [str(number) for number in range(16)]


@pytest.mark.parametrize("outcome", [OSError("no such name"), UnicodeError("label too long"), ["10.0.0.1"]])
def test_a_look_up_makes_room_whatever_came_of_it(outcome: Exception | list[str]) -> None:
    def resolve(host: str, port: int) -> list[str]:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    names = NameLookup(resolve, max_pending=1)
    for _ in range(3):
        if isinstance(outcome, Exception):
            with pytest.raises(type(outcome), match=str(outcome)):
                names.find("a", 80, 5)
        else:
            assert names.find("a", 80, 5) == outcome


@pytest.mark.timing
def test_a_handshake_that_trickles_has_an_end() -> None:
    """A TLS record of 16 KiB, a byte now and then: each read comes in time, the whole never does."""
    with socket.create_server((LOCAL, 0)) as server:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                client.sendall(b"\x16\x03\x03\x40\x00")
                for _ in range(100):
                    client.sendall(b"\x02")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        begin_s = time.monotonic()
        with pytest.raises(InvalidParameterError, match=r"within 0.2 s"):
            fetch(remote({"a.test": [LOCAL]}, remote_image_timeout_s=0.2), f"https://a.test:{server.getsockname()[1]}/")
        assert time.monotonic() - begin_s < 2.5


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.test/x",
        "gopher://a.test",
        "//a.test/x",
        "http://",
        "http://u:p@a.test/x",
        "http://a.test:99999/",
        "http://a.test/\r\nx: y",
        "http://a.test/a b",
        "x",
        "http://[::1",
        "javascript:1",
        "http://a.test:0/",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="must be a data URL, or an http or https URL"):
        fetch(remote({"a.test": [LOCAL]}), url)


def test_what_does_not_answer_or_has_no_image_says_nothing_of_itself(site: Site) -> None:
    port, _ = site
    with pytest.raises(InvalidParameterError, match="no such image"):
        fetch(remote({"a.test": [LOCAL]}), f"http://a.test:{port}/nothing")
    with pytest.raises(InvalidParameterError, match="does not answer"):
        fetch(remote({"a.test": [LOCAL]}), "http://a.test:1/image/3")
    with pytest.raises(InvalidParameterError, match="does not answer"):  # it speaks no TLS
        fetch(remote({"a.test": [LOCAL]}), f"https://a.test:{port}/image/3")
