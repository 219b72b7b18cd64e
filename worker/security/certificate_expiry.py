"""Expiry of certificates in PEM files: when the first of a chain is valid no more, and what to say of that.

What may not live here: files that are replaced under a server (`tls.py`), and where it is told.
"""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

DAY_S: Final = 86_400.0
NOTICE_S: Final = 14 * DAY_S
"""So long before the end it is told that a certificate is about to expire."""

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17


def first_expiry(pem: bytes) -> float:
    """When the first certificate of a PEM file expires, in seconds since 1970. Raises `ValueError` for one without."""
    found = [_not_after(ssl.PEM_cert_to_DER_cert(one)) for one in _certificates(pem.decode(errors="replace"))]
    if not found:
        raise ValueError("it has no certificate")
    return min(found)


def expiry_warning(path: str | Path, expires_s: float, now_s: float) -> str:
    """For people; empty while there is time. Both times are since 1970."""
    date = datetime.fromtimestamp(expires_s, UTC).isoformat(timespec="seconds")
    way_out = "replace its files, and new connections use them without a restart"
    if now_s >= expires_s:
        return f"the certificate {path} has expired ({date}): clients refuse new connections; {way_out}"
    if expires_s - now_s < NOTICE_S:
        return f"the certificate {path} expires in {(expires_s - now_s) / DAY_S:.1f} days ({date}); {way_out}"
    return ""


def _certificates(text: str) -> Iterator[str]:
    for piece in text.split(_BEGIN)[1:]:
        yield _BEGIN + piece.partition(_END)[0] + _END


def _not_after(der: bytes) -> float:
    """Of a certificate of X.509 (RFC 5280): the second time of its `validity`."""
    try:
        _, certificate, _ = _element(der)
        _, signed, _ = _element(certificate)
        tag, _, rest = _element(signed)
        skipped = 3 if tag == _VERSION else 2  # serial number, signature, issuer
        for _ in range(skipped):
            _, _, rest = _element(rest)
        _, validity, _ = _element(rest)
        _, _, rest = _element(validity)
        tag, text, _ = _element(rest)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        when = datetime.strptime(text.decode("ascii"), form)
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("it is no X.509 certificate") from error
    return when.replace(tzinfo=UTC).timestamp()


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The first element of DER: its tag, its content, and what follows it."""
    tag, length, at = data[0], data[1], 2
    if length >= 0x80:
        at = 2 + (length & 0x7F)
        length = int.from_bytes(data[2:at], "big")
    if len(data) < at + length:
        raise ValueError("it is cut off")
    return tag, data[at : at + length], data[at + length :]
