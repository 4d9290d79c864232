"""A certificate authority of the tests' own, and servers' contexts with good and bad certificates."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import warnings
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from outbox_relay.workbench.embedded.ports import LOOPBACK

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
NAME = "receiver.test"


class Authority:
    """One CA, and what it signs. `certificate_file` holds its certificate as PEM."""

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self.certificate_file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.certificate_file)
        self._directory = directory

    def good(self, *names: str) -> ssl.SSLContext:
        """Return a certificate for the loopback address and ``receiver.test``, or for ``names``."""
        return _context(self._ca.issue_cert(*(names or (LOOPBACK, "localhost", NAME))))

    def intermediate(self, directory: Path) -> tuple[Path, ssl.SSLContext]:
        """Return the file of an authority that this one signed, and a certificate by it."""
        child = self._ca.create_child_ca()
        file = directory / "intermediate.pem"
        child.cert_pem.write_to_path(file)
        return file, _context(child.issue_cert(LOOPBACK, NAME))

    def expired(self) -> ssl.SSLContext:
        """Return a certificate that was good until 2001."""
        return _context(self._ca.issue_cert(LOOPBACK, NAME, not_before=LONG_AGO, not_after=LONG_AGO))

    def wrong_host(self) -> ssl.SSLContext:
        """Return a context with a certificate for another host."""
        return self.good("elsewhere.test")

    def self_signed(self) -> ssl.SSLContext:
        """Return a context with a certificate of an unknown authority."""
        return _context(trustme.CA().issue_cert(LOOPBACK, NAME))

    def tls_1_0(self) -> ssl.SSLContext:
        """Return a good certificate, and nothing newer than TLS 1.0."""
        context = self.good()
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1
        return context

    def asks_for_certificate(self) -> ssl.SSLContext:
        """Return a good certificate, and require one of this authority from clients."""
        context = self.good()
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.certificate_file)
        return context

    def client_files(self, kind: str = "good") -> tuple[Path, Path]:
        """Certificate and key of a client, as PEM files: `good`, `expired` or `unknown` (another authority's)."""
        authority = trustme.CA() if kind == "unknown" else self._ca
        until = LONG_AGO if kind == "expired" else None
        made = authority.issue_cert("client.test", not_before=until, not_after=until)
        certificate, key = (self._directory / f"{kind}-client-{part}.pem" for part in ("certificate", "key"))
        certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return certificate, key


def plain_files(directory: Path) -> tuple[Path, Path]:
    """Make what plain OpenSSL commands make: a root without key identifiers and key usage, and a certificate by it.

    Return the root's certificate, and a file with certificate and key for the loopback address.
    """
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in ("plain root", "plain leaf")]
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    made: list[bytes] = []
    for key, name, extension in zip(
        keys, names, (x509.BasicConstraints(ca=True, path_length=None), loopback), strict=True
    ):
        builder = x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(extension, critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(Encoding.PEM))
    root, leaf = directory / "plain-root.pem", directory / "plain-leaf.pem"
    root.write_bytes(made[0])
    key = keys[1].private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    leaf.write_bytes(made[1] + key)
    return root, leaf


def _context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with certificate.private_key_and_cert_chain_pem.tempfile() as path:
        context.load_cert_chain(path)
    return context
