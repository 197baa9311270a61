"""Which requests a server takes from browsers. Another site's page may send writes: a request other than GET
is refused if `Sec-Fetch-Site`, else `Origin`, says so. Programs send neither. Against DNS rebinding, `Host`
must be a name of this server or an IP address. Regions are not registered by text or form bodies, which need
no preflight."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from ipaddress import ip_address

from tableside.serving.errors import ApiError, ErrorKind, short
from tableside.serving.settings import ServerSettings

HOST, ORIGIN, SITE = b"host", b"origin", b"sec-fetch-site"
READS = (HOST, ORIGIN, SITE)
"""The headers that `Origins.refusal` reads."""

ANY = "*"
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?", re.ASCII)
_OF_PAGES = (b"text/plain", b"multipart/form-data")


class Origins:
    """A server's names in lower case; None: any."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = names

    @classmethod
    def of(cls, settings: ServerSettings) -> "Origins":
        """Reads `allowed_hosts`; by default a server on loopback is localhost, any other has all names."""
        names = {name.lower() for name in settings.allowed_hosts}
        if (
            not names
            and settings.uds is None
            and (settings.host == "localhost" or is_loopback(settings.host))
        ):
            names = {"localhost"}
        return cls(None if not names or ANY in names else names)

    def refusal(self, method: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Returns why a request is refused, or None. headers: READS and any others, names in lower case."""
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == HOST]
        if (
            self._names is not None
            and (bad := next((h for h in hosts if not self._is_own(h)), None)) is not None
        ):
            return (
                f"Host {short(bad)} is no name of this server; it has: {', '.join(sorted(self._names))}, or "
                "an IP address. Name others with --allowed-hosts"
            )
        if method in (b"GET", b"HEAD"):
            return None
        sites = [value.lower() for name, value in headers if name == SITE]
        origins = [value.decode("latin-1").lower() for name, value in headers if name == ORIGIN]
        if sites:
            is_own = all(site in (b"same-origin", b"none") for site in sites)
        else:
            is_own = all(origin.partition("://")[2] in hosts for origin in origins)
        return (
            None
            if is_own
            else "a page of another site sent this request, and pages of other sites may not write here"
        )

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        return found is not None and (found[1] in (self._names or ()) or _is_address(found[1]))


def check_type(content_type: bytes | None) -> None:
    """ApiError 415: a page may send this body type anywhere without a preflight."""
    if content_type is not None and (kind := content_type.partition(b";")[0].strip().lower()) in _OF_PAGES:
        what = f"content-type {kind.decode('latin-1')!r}: expected application/json for shared memory regions"
        raise ApiError(415, ErrorKind.BAD_REQUEST, what)


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


@lru_cache
def is_loopback(host: str) -> bool:
    return _is_address(host) and ip_address(host.strip("[]")).is_loopback
