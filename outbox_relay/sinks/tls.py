"""TLS contexts of destinations: the authorities that they trust and the certificate that they present."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from outbox_relay.domain.files import is_stream, read_file

FILE_BYTES = 1 << 20
"""Maximum number of bytes of a certificate or key that are compared with those of the last reload."""
BUNDLE_BYTES = 1 << 24
"""The same of the file with the system's authorities."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. ``ca_file`` replaces the system's authorities; the key may be in the certificate's file."""

    ca_file: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context of these files, for TLS 1.2 and later. Blocks while files are read.

        Raises ValueError, with the setting and the file and without their content, when one cannot be used.
        """
        for setting, path in (
            ("ca_file", self.ca_file),
            ("client_certificate", self.client_certificate),
            ("client_key", self.client_key),
        ):
            if path is not None and is_stream(path):
                raise ValueError(f"{setting} {path}: is not a regular file")
        context = _for_http(self.ca_file)
        self._load_certificate(context)
        return context

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        if self.client_certificate is None:
            return
        named = f"client_certificate {self.client_certificate}"
        if self.client_key is not None:
            named += f" or client_key {self.client_key}"
        try:
            context.load_cert_chain(self.client_certificate, self.client_key, password=_no_password)
            for path in filter(None, (self.client_certificate, self.client_key)):
                read_file(path, FILE_BYTES)  # so that a reload can tell whether its contents have changed
        except _EncryptedError:
            raise ValueError(f"{named}: the key is encrypted; the relay takes keys without a password") from None
        except ssl.SSLError as error:
            raise ValueError(f"{named}: {_reason(error)}") from None
        except OSError as error:
            raise ValueError(f"{named}: {error.strerror}") from None


class _EncryptedError(Exception):
    """The key needs a password."""


def _no_password() -> str:
    raise _EncryptedError


def trusting(ca_file: str | Path | None = None, directory: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts the authorities of ``ca_file`` or ``directory``, else the system's."""
    context = ssl.create_default_context(cafile=ca_file, capath=directory)
    verify_alike(context)
    return context


def system_authorities() -> int:
    """Return a number that changes when the system's authorities do, as ``trusting`` finds them. Blocks."""
    paths = ssl.get_default_verify_paths()  # those of SSL_CERT_FILE and SSL_CERT_DIR, which exist
    bundle = read_file(Path(paths.cafile), BUNDLE_BYTES) if paths.cafile else None
    return hash((bundle, Path(paths.capath).stat().st_mtime_ns if paths.capath else None))


def verify_alike(context: ssl.SSLContext) -> None:
    """Let a new context verify certificates alike on every Python.

    Since 3.13 the default refuses private authorities without key identifiers or key usage, as plain OpenSSL makes
    them, and trusts an authority whose own issuer is missing.
    """
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT


def _for_http(ca_file: Path | None) -> ssl.SSLContext:
    try:
        context = trusting(ca_file)
    except ssl.SSLError as error:
        raise ValueError(f"ca_file {ca_file}: {_reason(error)}") from None
    except OSError as error:
        raise ValueError(f"ca_file {ca_file}: {error.strerror}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's word for ``error``."""
    return error.reason.lower().replace("_", " ") if error.reason else "holds nothing in PEM that fits"
