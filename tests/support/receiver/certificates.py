"""A certificate authority of the tests' own, and servers' contexts with good and bad certificates."""

from __future__ import annotations

import datetime
import ssl
import warnings
from pathlib import Path

import trustme

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


def _context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with certificate.private_key_and_cert_chain_pem.tempfile() as path:
        context.load_cert_chain(path)
    return context
