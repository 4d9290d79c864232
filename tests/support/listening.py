"""Ending servers of asyncio that live in a loop of their own, so that no connection is left half made."""

import asyncio

SPINS = 5
"""Turns of the loop in which what was accepted, or aborted, has taken its place."""


async def refuse_more(server: asyncio.Server) -> None:
    """Close the listening sockets. A connection that is accepted while its server closes would be left open."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    await settle()
    server.close()


async def cancel_others() -> None:
    """Cancel every other task of this loop, handshakes that are under way among them, and wait for their ends."""
    this = asyncio.current_task()
    while others := [task for task in asyncio.all_tasks() if task is not this]:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        await settle()


async def settle() -> None:
    """Let what was called for the next turn of the loop happen."""
    for _ in range(SPINS):
        await asyncio.sleep(0)
