"""What the environment variable ``PM_OPS`` asks of the adapters of engines: ``1``, ``0`` or a JSON object."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

VARIABLE = "PM_OPS"


def asked(how: str) -> Any:
    """True, False (also where the variable is not set), or the object's dict. ``how`` ends the message of an error."""
    text = os.environ.get(VARIABLE, "")
    try:
        entry = json.loads(text or "0")
    except json.JSONDecodeError:
        entry = text
    entry = bool(entry) if entry in (0, 1) else entry
    if entry is not True and entry is not False and not isinstance(entry, dict):
        raise ValueError(f"{VARIABLE}={text} is not understood; it must be 1, 0 or a JSON object: {how}")
    return entry


def options(settings: type, entry: Any, how: str) -> dict[str, Any] | None:
    """The arguments of a dataclass in an entry: an object, true for all defaults, or false, which gives None."""
    if entry is None or entry is False:
        return None
    entry = {} if entry is True else entry
    names = [field.name for field in dataclasses.fields(settings)]
    if not isinstance(entry, dict) or not set(entry) <= set(names):
        raise ValueError(
            f"pm_ops: {entry!r} is not understood; it must be true, or an object with any of {', '.join(names)}: {how}"
        )
    return entry


def require_supported(settings: Any, **supported: Sequence[Any]) -> None:
    """Raise ValueError for an attribute that has another value than those that are supported."""
    for name, values in supported.items():
        value = getattr(settings, name)
        if value not in values:
            raise ValueError(f"pm_ops: {name} is {value!r}; supported: {', '.join(map(str, values))}")
