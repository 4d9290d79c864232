"""The authorities that this system trusts, for libraries that look where the machine that built them keeps its own."""

from __future__ import annotations

import ssl
from pathlib import Path

FILES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Red Hat
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, BSD
)
"""The files in which systems keep the certificates of these authorities."""


def system_authorities() -> str | None:
    """Return the file with the certificates of the authorities, that of ``SSL_CERT_FILE`` first, or None."""
    places = (ssl.get_default_verify_paths().cafile, *FILES)
    return next((place for place in places if place and Path(place).is_file()), None)
