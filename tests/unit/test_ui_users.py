"""Users and tokens of the page: their files, hashes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.ui.users import (
    User,
    hash_password,
    read_tokens,
    read_users,
    token_digest,
    verify_password,
)

TOKEN = "t" * 20
QUICK = "scrypt$2$1$1$AAAA$AAAA"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_password_is_known_by_its_hash_and_no_other_is() -> None:
    stored = hash_password("päss:wörd")
    assert verify_password("päss:wörd", stored)
    assert not verify_password("päss:word", stored)
    assert not verify_password("", stored)
    assert hash_password("päss:wörd") != stored, "no salt"


@pytest.mark.parametrize("password", ["", "x" * 1025])
def test_a_password_that_is_empty_or_too_long_is_refused(password: str) -> None:
    with pytest.raises(ConfigurationError, match="1 to 1024 bytes"):
        hash_password(password)


def test_users_are_read_with_their_roles(tmp_path: Path) -> None:
    path = written(tmp_path / "users", f"# people\n\nanna:operator:{QUICK}\nbob@example.com:viewer:\n")
    found = read_users(path)
    assert [entry.user for entry in found.values()] == [User("anna", "operator"), User("bob@example.com", "viewer")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("anna:admin:x", "line 1: the role is viewer or operator"),
        ("anna:operator:secret", "line 1: the hash of anna is none that ui-user has printed"),
        ("anna:operator:scrypt$1073741824$8$1$AAAA$AAAA", "line 1: the hash of anna"),
        ("anna:operator:scrypt$3$8$1$AAAA$AAAA", "line 1: the hash of anna"),
        (f"anna:viewer:{QUICK}\nanna:operator:{QUICK}", "line 2: the name is not valid, or is used twice"),
        ("<b>:viewer:x", "line 1: the name is not valid"),
        ("", "no user is in it"),
    ],
)  # fmt: skip
def test_a_users_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_users(written(tmp_path / "users", text))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "operator:short",
        f"admin:{TOKEN}",
        "",
        f"operator:{TOKEN} x",
        f"operator:{TOKEN}ü",
        f"viewer:{TOKEN}\noperator:{TOKEN}",
    ],
)
def test_a_tokens_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_tokens(written(tmp_path / "tokens", text))
    assert TOKEN not in str(refused.value)


def test_a_token_is_looked_up_by_its_digest(tmp_path: Path) -> None:
    found = read_tokens(written(tmp_path / "tokens", f"# scripts\noperator:{TOKEN}\n"))
    assert found == {token_digest(TOKEN): User("token-2", "operator")}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    large = tmp_path / "large"
    large.write_bytes(b"#" * ((1 << 20) + 1))
    for path, said in ((tmp_path / "gone", "No such file"), (binary, "not UTF-8"), (large, "larger than")):
        with pytest.raises(ConfigurationError, match=said):
            read_users(path)
