"""All idioms: importing this package registers them."""

from __future__ import annotations

from tests.oracle.idioms import basics

__all__ = ["basics"]
