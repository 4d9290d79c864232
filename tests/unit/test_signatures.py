"""Signatures: the vectors of the reference libraries, invalid ones, and the end of a key."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from outbox_relay.formats.signatures import SigningKey, active_keys, parse_key, signature_header

FIRST = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SECOND = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
PRIVATE = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
PUBLIC = "1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
UID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
AT = 1614265330
BODY = b'{"test": 2432232314}'
SIGNED = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
SIGNED_ED25519 = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="

VECTORS = {
    "one key": ([FIRST], BODY, SIGNED),
    "Ed25519": ([PRIVATE], BODY, SIGNED_ED25519),
    "empty body": ([FIRST], b"", "v1,v48jdbgvh29KJz2Qc+ghw8G6vG3nAKnujWBg8oM/62A="),
    "two keys": ([SECOND, FIRST], BODY, f"v1,78nXHjpFP0tVJQW5D0SBwmVyyW87BV/rL6MgfM/Bw44= {SIGNED}"),
    "beyond ASCII": ([FIRST], '{"name":"Zoë 😀"}'.encode(), "v1,5dE+xCmDRCTT6qQMUoXsLn7BV/TeIxgDgZbwmC3tErE="),
    "every byte": ([FIRST], bytes(range(256)), "v1,sEcZ042G8Crqgxbybb3y0eDxQR3TcfYsk11I1XULhSI="),
    "both kinds": ([FIRST, PRIVATE], BODY, f"{SIGNED} {SIGNED_ED25519}"),
}


def keys(*secrets: str) -> list[SigningKey]:
    """Return the keys in these secrets."""
    return [parse_key(secret) for secret in secrets]


class Request(NamedTuple):
    """A request for the reference library to verify."""

    secret: str
    signature: str
    uid: str
    at: int
    body: bytes


def verify(secret: str, signature: str, uid: str, at: int, body: bytes) -> None:
    """Verify `signature` with the reference library, which raises if it is wrong or `at` is not now."""
    headers = {"webhook-id": uid, "webhook-timestamp": str(at), "webhook-signature": signature}
    Webhook(secret).verify(body, headers, json_parse=False)


@pytest.mark.parametrize(("secrets", "body", "expected"), VECTORS.values(), ids=VECTORS.keys())
def test_vectors_of_the_reference_libraries(secrets: Sequence[str], body: bytes, expected: str) -> None:
    assert signature_header(keys(*secrets), UID, AT, body) == expected


@given(
    st.binary(min_size=24, max_size=64),
    st.text(alphabet="0123456789abcdef-", min_size=1, max_size=36),
    st.text(max_size=200).map(str.encode),
)
def test_reference_library_verifies_the_signatures(secret: bytes, uid: str, body: bytes) -> None:
    text = "whsec_" + base64.b64encode(secret).decode()
    now = int(datetime.now(UTC).timestamp())
    verify(text, signature_header(keys(FIRST, text, PRIVATE), uid, now, body), uid, now, body)


CHANGES: list[tuple[Callable[[Request], Request], str]] = [
    (lambda r: r._replace(signature=r.signature[:-2] + ("A=" if r.signature[-2] != "A" else "E=")), "No matching"),
    (lambda r: r._replace(signature="v1,"), "No matching"),
    (lambda r: r._replace(uid=r.uid + "x"), "No matching"),
    (lambda r: r._replace(at=r.at - 1), "No matching"),
    (lambda r: r._replace(body=r.body + b" "), "No matching"),
    (lambda r: r._replace(secret=SECOND), "No matching"),
    (lambda r: r._replace(at=r.at - 600), "too old"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_reference_library_refuses_every_change(change: Callable[[Request], Request], said: str) -> None:
    now = int(datetime.now(UTC).timestamp())
    request = Request(FIRST, signature_header(keys(FIRST), UID, now, BODY), UID, now, BODY)
    verify(*request)
    with pytest.raises(WebhookVerificationError, match=said):
        verify(*change(request))


@pytest.mark.parametrize("secret", [FIRST, PRIVATE])
@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=-7))])
def test_a_key_signs_up_to_its_end_and_not_at_it(secret: str, zone: timezone) -> None:
    ends = datetime.fromtimestamp(AT, zone)
    both = [parse_key(SECOND), parse_key(secret, ends)]
    assert active_keys(both, AT - 0.001) == both
    assert active_keys(both, AT) == both[:1]
    assert active_keys(both, AT + 0.5) == both[:1]


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("", "should be whsec_ followed by the base64 of 24 to 64 random bytes"),
        (f"v1,{FIRST}", "should be whsec_"),
        ("whpk_" + PUBLIC, "should be whsec_"),
        ("whsec_", "holds 0 bytes after whsec_, should hold 24 to 64"),
        ("whsec_" + base64.b64encode(b"k" * 23).decode(), "holds 23 bytes"),
        ("whsec_" + base64.b64encode(b"k" * 65).decode(), "holds 65 bytes"),
        ("whsec_" + "ab" * 16 + "\n", "is not standard base64"),
        ("whsec_" + base64.urlsafe_b64encode(b"\xff" * 24).decode(), "is not standard base64"),
        ("whsec_" + "é" * 32, "is not standard base64"),
        ("whsk_", "holds 0 bytes after whsk_, should hold 32, the seed, or 64"),
        ("whsk_" + base64.b64encode(b"k" * 33).decode(), "holds 33 bytes after whsk_"),
        ("whsk_" + base64.b64encode(b"k" * 64).decode(), "a public key after whsk_ that does not belong to its seed"),
        (PRIVATE.removesuffix("=="), "is not standard base64 with its padding after whsk_"),
    ],
)
def test_invalid_secret_is_refused_without_repeating_it(secret: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"should|is not|holds") as refused:
        parse_key(secret)
    assert said in str(refused.value)
    encoded = secret.partition("_")[2]
    assert not encoded or encoded not in str(refused.value)


@pytest.mark.parametrize("secret", [FIRST, PRIVATE])
def test_a_key_does_not_show(secret: str) -> None:
    shown = repr(parse_key(secret, datetime.now(UTC)))
    assert secret.partition("_")[2] not in shown
    assert repr(base64.b64decode(secret.partition("_")[2])) not in shown
