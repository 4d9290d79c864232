"""Tests of the image run only where it was built, when they are asked for: `make image-test`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `image`, unless `-m` names it."""
    if "image" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("image")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
