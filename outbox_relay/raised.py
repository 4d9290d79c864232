"""Class and place of an exception of foreign code, whose message may repeat the payload."""

from __future__ import annotations

from pathlib import PurePath


def raised(error: BaseException) -> str:
    """Return the class of ``error`` and the line of code that raised it."""
    name, trace = type(error).__name__, error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or "importlib" in trace.tb_frame.f_code.co_filename:
        return name
    place = "/".join(PurePath(trace.tb_frame.f_code.co_filename).parts[-2:])
    return f"{name} at {place}:{trace.tb_lineno}"
