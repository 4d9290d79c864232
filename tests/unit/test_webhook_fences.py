"""The two lists that keep webhooks harmless: networks that are not dialled, headers that the settings may not add.

Both are written out here by hand, so that a line that is lost in the product is missed.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from outbox_relay.settings.addresses import denied
from outbox_relay.settings.request_headers import name_refusal

NETWORKS = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
    *("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    *("5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
]
BESIDE = [
    *("9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "172.15.255.255"),
    *("172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255"),
    *("168.63.129.15", "168.63.129.17", "64:ff9c::", "100:0:0:1::", "2001:200::", "2003::", "3fff:1000::", "5eff::"),
]
FORBIDDEN = [
    *("host", "connection", "content-type", "content-length", "content-encoding", "transfer-encoding", "te", "trailer"),
    *("upgrade", "expect", "keep-alive", "proxy-authorization", "proxy-connection", "cookie", "user-agent"),
    *("accept-encoding", "traceparent", "idempotency-key", "webhook-id", "webhook-signature", "ce-id", "x-amz-date"),
    *("x-goog-signature", "x-envoy-attempt-count", "x-forwarded-for", "outbox-key"),
]


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_that_is_not_dialled_is_not_from_its_first_address_to_its_last(network: str) -> None:
    whole = ip_network(network)
    for address in (whole[0], whole[-1]):
        assert denied(address, ()), address
        assert denied(str(address), (whole,)) is None, "what is listed is dialled"


@pytest.mark.parametrize("network", [network for network in NETWORKS if ":" not in network])
def test_a_network_that_is_not_dialled_is_not_inside_an_address_of_ipv6_either(network: str) -> None:
    for address in (ip_network(network)[0], ip_network(network)[-1]):
        assert denied(f"::ffff:{address}", ())


@pytest.mark.parametrize("address", BESIDE)
def test_addresses_beside_them_are_dialled(address: str) -> None:
    assert denied(ip_address(address), ()) is None


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_header_that_is_not_for_the_settings_is_refused_in_any_case(name: str) -> None:
    for written in (name, name.upper(), name.title()):
        assert name_refusal(written) == "is a header that the relay or the connection sets itself"


@pytest.mark.parametrize("name", ["authorization", "x-tenant", "x-amzn", "hosts", "contents", "date", "via"])
def test_other_headers_are_taken(name: str) -> None:
    assert name_refusal(name) is None
