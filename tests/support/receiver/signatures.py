"""Verifying signatures as a consumer would: with the reference library."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

from standardwebhooks import Webhook, WebhookVerificationError

from tests.support.receiver.request import Request

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def problem(request: Request, secrets: Sequence[str]) -> str | None:
    """Why none of `secrets` verifies the request, in a line; nothing when one does.

    The library takes text alone, so of a body that is not UTF-8 the signature is computed here.
    """
    headers = {name.lower(): value for name, value in request.headers}
    found = "no secret to verify with"
    for secret in secrets:
        try:
            Webhook(secret).verify(request.body, headers, json_parse=False)
        except UnicodeDecodeError:
            if _signs(secret, headers, request.body):
                return None
            found = "no matching signature of a body that is not UTF-8"
        except (WebhookVerificationError, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
        else:
            return None
    return found


def _signs(secret: str, headers: dict[str, str], body: bytes) -> bool:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers.get('webhook-id')}.{headers.get('webhook-timestamp')}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return expected in headers.get("webhook-signature", "").split(" ")
