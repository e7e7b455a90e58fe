"""The dotted keys of a config dataclass, with their values, defaults and help texts. No torch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def flatten(config: DataclassInstance, prefix: str = "") -> list[tuple[str, object]]:
    """Return (dotted key, value) of every leaf of a config dataclass, in the order of declaration."""
    pairs: list[tuple[str, object]] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        key = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            pairs += flatten(value, f"{key}.")
        else:
            pairs.append((key, value))
    return pairs


def describe(config_class: type, prefix: str = "") -> list[tuple[str, object, str]]:
    """Return (dotted key, default, help text) of every leaf of a config dataclass, in the order of declaration."""
    rows: list[tuple[str, object, str]] = []
    for item in dataclasses.fields(config_class):
        key = f"{prefix}{item.name}"
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if dataclasses.is_dataclass(default):
            rows += describe(type(default), f"{key}.")
        else:
            rows.append((key, default, item.metadata["help"]))
    return rows
