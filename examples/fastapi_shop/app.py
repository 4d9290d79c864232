"""A shop with FastAPI: it emits events with its orders, receives them as webhooks, and shows the page of the relay.

DATABASE_URL is the connection string, WEBHOOK_SECRET the secret that signs the webhooks, and STAFF_TOKEN the value of
the cookie `staff`, with which people may use the page. Run it with `uvicorn app:app` in one process.
"""

import hmac
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, Field, ValidationError
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.requests import HTTPConnection

from outbox_relay import inbox, outbox
from outbox_relay.ui import User, create_app

DATABASE_URL = os.environ["DATABASE_URL"]
STAFF_TOKEN = os.environ["STAFF_TOKEN"]
if not STAFF_TOKEN:
    raise SystemExit("STAFF_TOKEN is empty: set it to a long random value")
LARGEST_BODY_BYTES = 1 << 20

pool = AsyncConnectionPool(DATABASE_URL, min_size=1, max_size=10, timeout=5, open=False)
webhook = Webhook(os.environ["WEBHOOK_SECRET"])


# -- the transaction of a request ---------------------------------------------------------------------------------


async def transaction() -> AsyncGenerator[AsyncConnection]:
    """Open the transaction of a request. An exception of the handler rolls it back."""
    async with pool.connection() as connection, connection.transaction():
        yield connection


# With the scope "function" the commit comes before the answer. With the default, a client would have its 201 even if
# the commit fails.
Transaction: TypeAlias = Annotated[AsyncConnection, Depends(transaction, scope="function")]


# -- the page -----------------------------------------------------------------------------------------------------


def authenticate(request: HTTPConnection) -> User | None:
    """Return the member of the staff who has the cookie: your session and your rights belong here."""
    cookie = request.cookies.get("staff", "")
    if cookie and hmac.compare_digest(cookie.encode(), STAFF_TOKEN.encode()):
        return User("staff", "operator")
    return None


page = create_app(DATABASE_URL, authenticate)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
    """Open the pool when the application starts, and close all connections when it ends."""
    async with pool:
        yield
    await page.aclose()


app = FastAPI(lifespan=lifespan)
app.mount("/outbox", page)


# -- orders -------------------------------------------------------------------------------------------------------


class NewOrder(BaseModel):
    """An order that a client places."""

    total: int = Field(gt=0, le=1_000_000)


@app.post("/orders", status_code=201)
async def place_order(order: NewOrder, connection: Transaction) -> dict[str, int]:
    """Insert an order and emit its event: both are committed, or neither is."""
    cursor = await connection.execute("insert into orders (total) values (%s) returning id", (order.total,))
    [(order_id,)] = await cursor.fetchall()
    content = {"id": order_id, "total": order.total}
    await outbox.aemit(connection, "order.created", content, key=f"order-{order_id}")
    return content


# -- webhooks -----------------------------------------------------------------------------------------------------


class CreatedOrder(BaseModel):
    """The payload of `order.created`."""

    id: int = Field(ge=1, lt=2**63)
    total: int = Field(ge=0, lt=2**31)


async def verified(request: Request) -> bytes:
    """Return the body of a webhook whose signature is right."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_BODY_BYTES:
            raise HTTPException(413, "the body is too large")
    try:
        webhook.verify(bytes(body), dict(request.headers), json_parse=False)
    except (WebhookVerificationError, ValueError):
        raise HTTPException(401, "the signature is wrong or too old") from None
    return bytes(body)


@app.post("/webhooks", status_code=204)
async def receive(request: Request, body: Annotated[bytes, Depends(verified)], connection: Transaction) -> Response:
    """Write the invoice of an order once, however often its event is delivered.

    The signature covers the uid, the time and the body, but no other header: whether the type is right rests on the
    payload and on the route.
    """
    if request.headers.get("outbox-type", "order.created") != "order.created":
        return Response(status_code=204)  # of no concern here, so that a retry would not help
    try:
        uid, order = inbox.uid_of(request.headers), CreatedOrder.model_validate_json(body)
        consumer = inbox.consumer_of("billing", request.headers)
    except (inbox.InvalidMark, ValidationError):
        raise HTTPException(422, "this is no order.created") from None
    if await inbox.aonce(connection, consumer, uid):
        values = (uid, order.id, order.total)
        insert = "insert into invoices (event, order_id, total) values (%s, %s, %s) on conflict do nothing"
        await connection.execute(insert, values)  # a replay finds the invoices that were not lost
    return Response(status_code=204)
