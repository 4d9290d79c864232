"""Objects of an archive: what was written comes back byte for byte, in both formats."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from outbox_relay.postgres.retention import DayEvent
from outbox_relay.retention.files import Folder, encode, remove
from outbox_relay.retention.worker import Contents, NotVerified, Part, Task, reason_of, verify

FORMS = ["jsonl.zst", "parquet"]
PLAIN = DayEvent(
    1, "740", 5, "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b", "order.created", "k", "application/json", None, None,
    "2026-10-01 12:00:00.123456+00", "app", None, None, b"{}", "hash:1",
)  # fmt: skip
ODD = [
    PLAIN,
    PLAIN._replace(id=2, payload=b"", key=""),
    PLAIN._replace(id=3, payload=None, key=None, emitter=None),
    PLAIN._replace(id=4, payload=b"aGk="),
    PLAIN._replace(id=5, payload=b"\xff\x00hi"),
    PLAIN._replace(id=6, payload='ü\u2028\n"\\\x00\U0001f600'.encode(), key="'; drop--\n\tü"),
    PLAIN._replace(id=7, deliver_at="infinity", created_at="-infinity", headers="{}"),
    PLAIN._replace(id=8, deliver_at="0044-03-15 00:00:00+00 BC", created_at="20000-01-01 00:00:00+00"),
    PLAIN._replace(id=9, headers='{"a": 1e400, "b": 1.10000000000000000000001, "ü": "\\u0001"}'),
    PLAIN._replace(id=10, tenant="acme\n'ü", priority=-32768),
    PLAIN._replace(id=11, tenant="", priority=0),
    PLAIN._replace(id=-(1 << 63), xid=str((1 << 64) - 1), payload=bytes(range(256)) * 5000),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_column_comes_back(tmp_path: Path, form: str) -> None:
    folder = Folder(str(tmp_path), "2026-10-01-a")
    with folder.writing("part", form) as write:
        write(ODD[:4])
        write(ODD[4:])
    assert list(folder.events("part", form)) == [event._replace(key_hash=None) for event in ODD]


@pytest.mark.parametrize("form", FORMS)
def test_a_part_that_is_not_what_was_written_is_found(tmp_path: Path, form: str) -> None:
    folder = Folder(str(tmp_path), "2026-10-01-a")
    with folder.writing("part", form) as write:
        write(ODD)
    hashed = hashlib.sha256(b"".join(map(encode, ODD))).hexdigest()
    verify(folder, Part("part", events=len(ODD), sha256=hashed), form)
    for wrong in (Part("part", events=len(ODD) - 1, sha256=hashed), Part("part", events=len(ODD), sha256="0")):
        with pytest.raises(NotVerified):
            verify(folder, wrong, form)


@pytest.mark.parametrize("form", FORMS)
def test_objects_and_the_folders_above_them_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A killed process loses nothing that the system still has in memory, so no test of one goes red without this."""
    synced: dict[str, int] = {}
    inner = os.fsync

    def note(descriptor: int) -> None:
        synced[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size
        inner(descriptor)

    monkeypatch.setattr("outbox_relay.retention.files.os.fsync", note)
    folder = Folder(str(tmp_path), "2026-10-01-a")
    with folder.writing("part", form) as write:
        write(ODD)
    folder.write("manifest.json", b"{}")
    place = tmp_path / "2026-10-01-a"
    assert synced.keys() == {str(path) for path in (place / "part", place / "manifest.json", place, tmp_path)}
    assert synced[str(place / "part")] == (place / "part").stat().st_size > 0, "the whole object, after its last write"


def test_a_manifest_names_parts_and_says_whether_its_keys_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.retention.worker.KEYS_MAX", 2)
    contents = Contents(parts=[Part("a", 2, 10, 1, 5, "x"), Part("b", 1, 5, 9, 9, "y")])
    task = Task("", False, "/tmp", "parquet", "-infinity", 1, "f")  # noqa: S108 - nothing is written
    for key in ("h1", "h2", "h1", None):
        contents.add_key(key)
    found = contents.manifest(task)
    assert (found["day"], found["events"], found["first_id"], found["last_id"]) == ("default", 3, 1, 9)
    assert (found["key_hashes"], found["key_hashes_complete"]) == (["h1", "h2"], True)
    contents.add_key("h3")
    found = contents.manifest(task)
    assert (found["key_hashes"], found["key_hashes_complete"]) == ([], False)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc"])
def test_nothing_but_a_folder_of_an_archive_is_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(ValueError, match="not the name of a folder"):
        remove(str(tmp_path / "kept"), name)
    assert (tmp_path / "kept").exists()


def test_a_reason_names_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NOT-AKIA-BUT-ONE")
    task = Task("", False, "s3://bucket", "parquet", "", 0, "check-1", probes=True)
    error = OSError(f"AWS Error ACCESS_DENIED: NOT-AKIA-BUT-ONE {secret} X-Amz-Signature=abc (Request ID: 7)")
    assert reason_of(error, task) == "AWS Error ACCESS_DENIED: … … X-Amz-Signature=…"
