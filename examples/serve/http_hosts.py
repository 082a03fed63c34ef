"""Whose pages may ask a server that listens on this machine alone.

Any page that is open in a browser here can reach such a server: under the name of its
own site, which it leads to this machine (DNS rebinding), or by posting to it. So
requests by other names than this machine's are refused, and posts of pages of other
sites.
"""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.http_answers import error_response
from serve.openai_api import ApiError, in_words


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
    """
    others = [name.lower() for name in others]
    if _is_loopback(listener.getsockname()[0]):
        return frozenset(("localhost", host.lower(), *others))
    return frozenset((host.lower(), *others)) if others else None


class KnownHosts:
    """An ASGI application that is asked by its own names alone.

    Args:
        app: it.
        hosts: the names, without ports; addresses of loopback are among them.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if error is None else error_response(error)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._knows(f"//{host}"):
            return _refused("Host", host, "unknown_host")
        posts = scope["method"] not in ("GET", "HEAD")
        if posts and origin is not None and not self._knows(origin):
            return _refused("Origin", origin, "foreign_origin")
        return None

    def _knows(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").removesuffix(".")
        except ValueError:  # brackets without an address
            return False
        return name in self._hosts or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refused(header: str, got: str, code: str) -> ApiError:
    message = (
        f"{header} must name this machine, as localhost does, got {in_words(got)}; "
        "start the server with --allow-host for other names"
    )
    return ApiError(403, message, kind="permission_error", code=code)
