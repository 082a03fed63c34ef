"""Whose pages may ask a server that listens on this machine alone.

Any page that is open in a browser here can reach such a server: under the name of its
own site, which it leads to this machine (DNS rebinding), or by posting to it. So
requests by other names than this machine's are refused, and posts of pages of other
sites. A server for others does the same once it is told its names.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.http_answers import error_response
from serve.openai_api import ApiError, in_words

# Names and addresses of IPv4, or an address of IPv6; a port may follow either.
_NAME = r"([a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?|\[[0-9a-f]*:[0-9a-f:.]*\])(?::[0-9]*)?"
_HOST = re.compile(_NAME, re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile("https?://" + _NAME, re.ASCII | re.IGNORECASE)


def known_hosts(
    listener: socket.socket, host: str, others: Iterable[str] = ()
) -> frozenset[str] | None:
    """The names by which a server is asked.

    Args:
        listener: where it listens.
        host: as the user named that.
        others: further names, a proxy's for example.

    Returns:
        They; None for any: it listens beyond this machine, and no names were given.

    Raises:
        ValueError: one of the others is no name.
    """
    names = {host_name(name) for name in others}
    if not names and not _is_loopback(listener.getsockname()[0]):
        return None
    return frozenset(names | ({host_name(host)} if host else set()))


def host_name(given: str) -> str:
    """A name or an address as what a client says is compared with it.

    Args:
        given: with a port or without, which does not count. Letters beyond ASCII
            become what browsers send (`xn--…`).

    Raises:
        ValueError: it is neither.
    """
    address = _address(given)  # one of IPv6 may come without brackets
    name = str(address) if address else _named(_HOST, _in_ascii(given))
    if not name:
        raise ValueError(
            "host_name: a host must be a name or an address, as api.example is, got "
            f"{in_words(given)}; leave out scheme, path and stars, and write letters "
            "beyond ASCII as browsers send them (xn--…)"
        )
    return name


class KnownHosts:
    """An ASGI application that is asked by its own names alone.

    Args:
        app: it.
        hosts: the names; localhost and addresses of loopback are always among them.

    Raises:
        ValueError: one of the hosts is no name.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = {"localhost", *map(host_name, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if error is None else error_response(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._knows(_HOST, host):
            return _refused("Host", host, "unknown_host")
        posts = scope["method"] not in ("GET", "HEAD")
        if posts and origin is not None and not self._knows(_ORIGIN, origin):
            return _refused("Origin", origin, "foreign_origin")
        return None

    def _knows(self, pattern: re.Pattern[str], said: str) -> bool:
        name = _named(pattern, said)
        return name in self._hosts or _is_loopback(name)


def _named(pattern: re.Pattern[str], said: str) -> str:
    """The name in it, as names are compared; "" where it is none."""
    found = pattern.fullmatch(said)
    name = found[1].lower().removesuffix(".") if found else ""
    bare = name.strip("[]")
    address = _address(bare)
    if address:
        return str(address)
    return name if name == bare else ""


def _in_ascii(name: str) -> str:
    """As it is sent; "" where it has no such form, or one of another name."""
    if name.isascii():
        return name
    try:
        sent = name.encode("idna")
        # Python makes "ss" of "ß", which is another name today.
        return sent.decode() if sent.decode("idna") == name.lower() else ""
    except UnicodeError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_loopback


def _refused(header: str, got: str, code: str) -> ApiError:
    message = (
        f"{header} must name this machine, as localhost does, got {in_words(got)}; "
        "start the server with --allow-host for other names"
    )
    return ApiError(403, message, kind="permission_error", code=code)
