"""Administration of topics, brokers, users and their rights."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

from confluent_kafka.admin import (
    AclBinding,  # pyright: ignore[reportPrivateImportUsage] - documented here; the module lacks __all__
    AclBindingFilter,  # pyright: ignore[reportPrivateImportUsage]
    AclOperation,  # pyright: ignore[reportPrivateImportUsage]
    AclPermissionType,  # pyright: ignore[reportPrivateImportUsage]
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourcePatternType,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
    ScramCredentialInfo,  # pyright: ignore[reportPrivateImportUsage]
    ScramMechanism,  # pyright: ignore[reportPrivateImportUsage]
    UserScramCredentialUpsertion,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewTopic

from outbox_relay.workbench.embedded.broker import partitions_with_leader
from tests.support.wait import until

REQUEST_SECONDS = 10
LEADERS_SECONDS = 30


class Administration:
    """An admin client of the brokers at `bootstrap`."""

    def __init__(self, bootstrap: str) -> None:
        self.client = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._ask = cast("Any", self.client)

    def create_topic(
        self, name: str, partitions: int, replication: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic and wait until each partition has a leader."""
        self._done(self._ask.create_topics([NewTopic(name, partitions, replication, config=dict(config or {}))]))
        what = f"topic {name} has {partitions} leaders"
        until(lambda: len(partitions_with_leader(self.client, name)) == partitions, seconds=LEADERS_SECONDS, what=what)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self.client.list_topics(timeout=REQUEST_SECONDS).topics)

    def delete_topic(self, name: str) -> None:
        """Delete a topic, and wait until it is gone."""
        self._done(self._ask.delete_topics([name]))
        what = f"topic {name} is gone"
        until(lambda: name not in self.client.list_topics(timeout=5).topics, seconds=LEADERS_SECONDS, what=what)

    def set_broker(self, number: int, config: Mapping[str, str]) -> None:
        """Change settings of a running broker."""
        self._change(ResourceType.BROKER, str(number), config)

    def allow(self, user: str, operation: str, *, topic: str) -> None:
        """Allow `user` an operation on topics whose name begins with `topic`."""
        self._done(self._ask.create_acls([self._rule(AclBinding, user, operation, topic)]))

    def take_back(self, user: str, operation: str, *, topic: str) -> None:
        """Revoke a right given by `allow`."""
        self._done(self._ask.delete_acls([self._rule(AclBindingFilter, user, operation, topic)]))

    def set_password(self, user: str, password: str) -> None:
        """Set the SCRAM password of `user`."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = UserScramCredentialUpsertion(user, info, password.encode())
        self._done(self._ask.alter_user_scram_credentials([wanted]))

    def _rule(self, shape: Any, user: str, operation: str, topic: str) -> Any:
        return shape(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.PREFIXED,
            f"User:{user}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )

    def _change(self, of: ResourceType, name: str, config: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in config.items()
        ]
        self._done(self._ask.incremental_alter_configs([ConfigResource(of, name, incremental_configs=entries)]))

    def _done(self, asked: Mapping[object, Future[None]]) -> None:
        for done in asked.values():
            done.result(REQUEST_SECONDS)
