"""Class and place of an exception of foreign code, whose message may repeat the payload."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

_LIBRARIES = ("/site-packages/", "/dist-packages/", f"{Path(os.__file__).parent}/", f"{Path(__file__).parent}/")


def raised(error: BaseException) -> str:
    """Return the class of ``error`` and the line of code that raised it, outside of libraries if there is one."""
    name, trace, place, own = type(error).__name__, error.__traceback__, None, None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        place = filename, trace.tb_lineno
        own = own if any(part in filename for part in _LIBRARIES) else place
        trace = trace.tb_next
    if place is None or "importlib" in place[0]:
        return name
    filename, line = own or place
    return f"{name} at {'/'.join(PurePath(filename).parts[-2:])}:{line}"
