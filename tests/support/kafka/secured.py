"""A broker with TLS, SASL and access rules, and its certificates."""

import datetime
import ssl
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from outbox_relay.workbench.embedded import ports
from tests.support.kafka.broker import QUICK_START, KafkaBroker
from tests.support.kafka.topics import Administration
from tests.support.wait import until

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
UNIT = "tests"
"""Brokers switch to a new certificate only if it has the same unit."""
EXPIRED = datetime.datetime(2021, 1, 1, tzinfo=datetime.UTC)


class Certificates:
    """An authority, and valid and expired certificates of a server and a client."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        authority = trustme.CA()
        self.authority = directory / "ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        self.server = self._written("server", authority.issue_cert(ports.LOOPBACK, organization_unit_name=UNIT))
        self.expired = self._written(
            "expired",
            authority.issue_cert(ports.LOOPBACK, organization_unit_name=UNIT, not_before=LONG_AGO, not_after=EXPIRED),
        )
        self.client = self._written("client", authority.issue_cert("relay.example", common_name="relay"))
        self.expired_client = self._written(
            "expired-client",
            authority.issue_cert("relay.example", common_name="relay", not_before=LONG_AGO, not_after=EXPIRED),
        )

    def _written(self, name: str, certificate: trustme.LeafCert) -> Path:
        # Java reads keys only as PKCS #8.
        key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
        path = self._directory / f"{name}.pem"
        chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + chain)
        return path


class SecuredBroker(KafkaBroker):
    """Listeners: plain, where everything is allowed; SCRAM and PLAIN over TLS; client certificates; OAUTHBEARER.

    Users of the other listeners may do only what access rules allow. No topic is created automatically.
    """

    def __init__(self) -> None:
        super().__init__(java=QUICK_START)
        self.certificates = Certificates(self.directory)
        self._ports = {name: ports.free_port() for name in ("SCRAM", "MTLS", "OAUTH")}
        listeners = {"PLAINTEXT": self.port, **self._ports, "CONTROLLER": self.controller_port}
        named = ",".join(f"{name}://{ports.LOOPBACK}:{port}" for name, port in listeners.items())
        login = "org.apache.kafka.common.security"
        self.add_settings(
            {
                "listeners": named,
                "advertised.listeners": named,
                "listener.security.protocol.map": (
                    "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SCRAM:SASL_SSL,MTLS:SSL,OAUTH:SASL_PLAINTEXT"
                ),
                "auto.create.topics.enable": "false",
                # Several threads would switch to a new certificate at different times.
                "num.network.threads": "1",
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-512,PLAIN",
                "listener.name.scram.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
                "listener.name.scram.plain.sasl.jaas.config": (
                    f'{login}.plain.PlainLoginModule required user_plain="plain-secret";'
                ),
                "listener.name.scram.ssl.keystore.type": "PEM",
                "listener.name.scram.ssl.keystore.location": str(self.certificates.server),
                "listener.name.mtls.ssl.keystore.type": "PEM",
                "listener.name.mtls.ssl.keystore.location": str(self.certificates.server),
                "listener.name.mtls.ssl.truststore.type": "PEM",
                "listener.name.mtls.ssl.truststore.location": str(self.certificates.authority),
                "listener.name.mtls.ssl.client.auth": "required",
                "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]*).*$/$1/",
                "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
                "listener.name.oauth.oauthbearer.sasl.jaas.config": (
                    f'{login}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
                ),
            }
        )

    @property
    def administration(self) -> Administration:
        """Return a new admin client."""
        return Administration(self.bootstrap)

    def address(self, listener: str) -> str:
        """Return the address of a listener."""
        return f"{ports.LOOPBACK}:{self._ports[listener]}"

    def show(self, listener: str, certificate: Path) -> None:
        """Give a listener another certificate, and wait until it is used."""
        prefix = f"listener.name.{listener.lower()}.ssl.keystore"
        self.administration.set_broker(1, {f"{prefix}.location": str(certificate), f"{prefix}.type": "PEM"})
        wanted = certificate.read_text().partition("-----BEGIN CERTIFICATE-----")[2].partition("-----END")[0]
        port = self._ports[listener]
        until(
            lambda: wanted in ssl.get_server_certificate((ports.LOOPBACK, port), timeout=5),
            seconds=20,
            what=f"{listener} shows {certificate.name}",
        )

    def scram(
        self, password: str | None = None, mechanism: str = "SCRAM-SHA-512", user: str = "relay"
    ) -> dict[str, str]:
        """Return the producer's settings for a user of the listener SCRAM."""
        found = {
            "bootstrap.servers": self.address("SCRAM"),
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.certificates.authority),
            "sasl.mechanism": mechanism,
            "sasl.username": user,
        }
        return found if password is None else {**found, "sasl.password": password}

    def mtls(self, certificate: Path) -> dict[str, str]:
        """Return the producer's settings for a client with `certificate`."""
        return {
            "bootstrap.servers": self.address("MTLS"),
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.certificates.authority),
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(certificate),
        }

    def oauth(self, user: str) -> dict[str, str]:
        """Return the producer's settings for a user with an unsigned token."""
        return {
            "bootstrap.servers": self.address("OAUTH"),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "enable.sasl.oauthbearer.unsecure.jwt": "true",
            "sasl.oauthbearer.config": f"principal={user}",
        }
