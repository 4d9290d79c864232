"""The two lists that keep webhooks harmless: networks that are not dialled, headers that the settings may not add.

Both are written out here by hand, so that a line that is lost in the product is missed.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from outbox_relay.settings.addresses import denied
from outbox_relay.settings.webhook import further_header

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
    *("168.63.129.15", "168.63.129.17", "2001:200::", "2003::", "3fff:1000::", "2000::", "2606:4700::1111"),
    *("::ffff:93.184.215.14", "64:ff9b::93.184.215.14", "2606:4700::5efe:5db8:d70e", "2606:4700::200:5efe:5db8:d70e"),
]
NOT_GLOBAL = ["64:ff9c::", "100:0:0:1::", "1fff:ffff::", "4000::", "5eff::", "8000::1", "fe00::1", "f000::1"]
TRANSITIONS = {
    "mapped": "::ffff:{v4}",
    "compatible": "::{v4}",
    "SIIT": "::ffff:0:{v4}",
    "NAT64": "64:ff9b::{v4}",
    "local NAT64, 96 bits": "64:ff9b:1::{v4}",
    "local NAT64, 48 bits": "64:ff9b:1:{high}:{mid}:{low}00::",
    "6to4": "2002:{high}:{low4}::1",
    "Teredo server": "2001:0:{high}:{low4}::1",
    "ISATAP, private": "2606:4700::5efe:{high}:{low4}",
    "ISATAP, global": "2606:4700::200:5efe:{high}:{low4}",
    "ISATAP, link-local": "fe80::5efe:{high}:{low4}",
}
"""The form of an IPv4 address within one of IPv6, by the mechanism."""
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


@pytest.mark.parametrize("address", NOT_GLOBAL)
def test_addresses_of_ipv6_outside_the_global_range_are_not_dialled(address: str) -> None:
    assert denied(address, ()) == "not global"
    assert denied(address, (ip_network(f"{address}/128"),)) is None


def inside(form: str, address: str) -> str:
    """Return ``address``, of IPv4, in one of IPv6."""
    whole = int(ip_address(address))
    high, low4 = f"{whole >> 16:x}", f"{whole & 0xFFFF:x}"
    return form.format(v4=address, high=high, low4=low4, mid=f"{whole >> 8 & 0xFF:x}", low=f"{whole & 0xFF:x}")


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.1", "127.0.0.1", "168.63.129.16"])
@pytest.mark.parametrize("form", TRANSITIONS.values(), ids=TRANSITIONS)
def test_an_inner_address_is_not_dialled_by_any_way_of_writing_it_into_ipv6(form: str, address: str) -> None:
    assert denied(inside(form, address), ())


@pytest.mark.parametrize("form", TRANSITIONS.values(), ids=TRANSITIONS)
def test_a_network_that_the_settings_refuse_is_refused_in_every_form(form: str) -> None:
    """Whatever else is allowed: refusing counts for more."""
    everything = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    refused = (ip_network("93.184.0.0/16"),)
    assert denied(inside(form, "93.184.215.14"), everything, refused) == "refused (deny_networks)"
    assert denied(inside(form, "93.185.215.14"), everything, refused) is None


def test_refusing_a_network_of_ipv6_covers_a_translator_of_the_operators() -> None:
    assert denied("2a02:1:2::a00:1", ()) is None
    assert denied("2a02:1:2::a00:1", (), (ip_network("2a02:1:2::/96"),)) == "refused (deny_networks)"


def test_a_listed_network_holds_for_the_ways_of_nat64_too() -> None:
    assert denied("64:ff9b::10.1.2.3", (ip_network("10.1.0.0/16"),)) is None


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_header_that_is_not_for_the_settings_is_refused_in_any_case(name: str) -> None:
    for written in (name, name.upper(), name.title()):
        with pytest.raises(ValueError, match="is a header that the relay or the connection sets itself"):
            further_header(written)


@pytest.mark.parametrize("name", ["authorization", "x-tenant", "x-amzn", "hosts", "contents", "date", "via"])
def test_other_headers_are_taken(name: str) -> None:
    assert further_header(name) == name
