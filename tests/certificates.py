"""Certificates for tests: an authority, and what it signs: good, expired, for another name, for clients."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.worker.wire.tls import Tls

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path

    def copy_to(self, other: "Pair") -> None:
        """As an operator rotates: each file is replaced in one piece, one after the other."""
        for mine, its in ((self.key, other.key), (self.cert, other.cert)):
            new = its.with_suffix(".new")
            new.write_bytes(mine.read_bytes())
            new.replace(its)


class Authority:
    """Signs certificates, which it writes into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.cert = folder / f"{name}.pem"
        built = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self._root = built.sign(self._key, hashes.SHA256())
        self.cert.write_bytes(self._root.public_bytes(serialization.Encoding.PEM))

    def pair(
        self,
        name: str,
        *hosts: str,
        is_expired: bool = False,
        signs_itself: bool = False,
        common_name: str = "",
        valid_s: float | None = None,
    ) -> Pair:
        """For these DNS names and addresses; by default for loopback. It expires after `valid_s`, or in days."""
        hosts = hosts or ("127.0.0.1", "localhost")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name or name)])
        builder = self._builder(
            subject, key, is_expired=is_expired, issuer=subject if signs_itself else self._name, valid_s=valid_s
        )
        names = [
            x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host) for host in hosts
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        built = builder.sign(key if signs_itself else self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.cert.write_bytes(built.public_bytes(serialization.Encoding.PEM))
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return pair

    def tls(self, pair: Pair | None = None, *, trusts: bool = True) -> Tls:
        """The files of one end that trusts this authority."""
        ca = self.cert if trusts else None
        return Tls(ca=ca) if pair is None else Tls(ca=ca, cert=pair.cert, key=pair.key)

    def _builder(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        is_expired: bool = False,
        issuer=None,
        valid_s: float | None = None,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        left = datetime.timedelta(seconds=valid_s) if valid_s is not None else -DAY if is_expired else 30 * DAY
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + left)
        )
