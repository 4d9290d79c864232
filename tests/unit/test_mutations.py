"""The mutations of the schema speak of the code as it is."""

from __future__ import annotations

import pytest

from tests.property.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.left_out)
def test_what_a_mutation_takes_out_stands_in_the_code_once(mutation: Mutation) -> None:
    file, start, end = mutation.found_in(ROOT)
    assert file.read_text(encoding="utf-8").count(mutation.text, start, end) == 1
    path, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
