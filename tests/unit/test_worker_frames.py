"""Frames between the relay and a worker: whole ones, pieces, large ones, and hostile ones."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import LENGTHS, MOST_BODY, MOST_PAYLOAD, BadFrame, Frame, FrameReader, frame, item

CALL, OTHER = item(1, "ключ", None, 0.5, True), item(2, '"\\\n', None)


def test_frames_are_read_from_pieces_of_any_size() -> None:
    frames = [Frame("deliver", [[1, "ключ", None, 0.5, True], [2, '"\\\n', None]], b"\x00\xff" * 300)]
    frames.append(Frame("done", [1, 2], b""))
    data = frame("deliver", [CALL, OTHER], [b"\x00\xff" * 100, b"\x00\xff" * 200]) + frame("done", [b"1", b"2"])
    for size in (1, 2, 7, 8, 9, len(data)):
        reader = FrameReader()
        found = [each for at in range(0, len(data), size) for each in reader.feed(data[at : at + size])]
        assert found == frames


def test_a_huge_payload_arrives_in_pieces() -> None:
    body = bytes(range(256)) * (64 << 10)
    data, reader, found = frame("deliver", [CALL], [body]), FrameReader(), list[Frame]()
    for at in range(0, len(data), 65_536):
        found += reader.feed(data[at : at + 65_536])
    assert [each.body == body for each in found] == [True]


HOSTILE = {
    "no JSON": b"nonsense",
    "no list": b"{}",
    "an empty list": b"[]",
    "no kind": b"[1]",
    "not UTF-8": b'["\xff"]',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_frame_is_refused(head: bytes) -> None:
    with pytest.raises(BadFrame):
        list(FrameReader().feed(LENGTHS.pack(len(head), 0) + head))


@pytest.mark.parametrize("lengths", [(65, 0), (0xFFFFFFFF, 0), (1, 1), (1, 0xFFFFFFFF)])
def test_a_length_above_the_limit_is_refused_before_anything_is_read(lengths: tuple[int, int]) -> None:
    with pytest.raises(BadFrame):
        list(FrameReader(64, 0).feed(LENGTHS.pack(*lengths)))


def test_a_frame_before_a_bad_one_is_read() -> None:
    frames = FrameReader().feed(frame("a", [b"1"]) + LENGTHS.pack(1, 0) + b"x")
    assert next(frames).kind == "a"
    with pytest.raises(BadFrame):
        next(frames)


def test_what_the_other_end_would_refuse_is_not_made() -> None:
    with pytest.raises(BadFrame):
        item("x" * (17 << 20))
    with pytest.raises(BadFrame):
        frame("x", [b"1" * (17 << 20)])
    assert json.loads(frame("x", [b"1"])[LENGTHS.size :]) == ["x", 1]
    assert MOST_BODY > MOST_PAYLOAD >= 1 << 30


async def test_a_channel_takes_a_transport_that_is_none_of_asyncio() -> None:
    """Those of uvloop, which a module of handlers may install, are no subclasses."""
    transport = Mock(spec=["write", "is_closing"])
    transport.is_closing.return_value = False
    channel = Channel(Mock(), Mock(), FrameReader())
    channel.connection_made(transport)
    channel.send("ready", b"true")
    channel.flush()
    transport.write.assert_called_once_with(frame("ready", [b"true"], []))
