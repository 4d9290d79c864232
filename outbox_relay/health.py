"""The HTTP listener: ``/livez`` for "restart me if this fails", ``/readyz`` for "I am doing my work"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web


class Health:
    """Answers from what the process knows; never asks the database or a destination."""

    def __init__(self, address: tuple[str, int], ready: Callable[[], tuple[bool, Mapping[str, object]]]) -> None:
        self._address = address
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self) -> tuple[str, int]:
        """Listen; returns host and port. Raises OSError when the address cannot be had."""
        app = web.Application()
        app.add_routes([web.get("/livez", self._livez), web.get("/readyz", self._readyz)])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        host, port = self._address
        await web.TCPSite(self._runner, host, port, shutdown_timeout=1.0).start()
        bound = self._runner.addresses[0]
        return bound[0], bound[1]

    async def stop(self) -> None:
        """Listen no longer."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, body = self._ready()
        return web.json_response({"ready": ready, **body}, status=200 if ready else 503)
