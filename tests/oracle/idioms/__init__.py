"""All idioms: importing this package registers them."""

from __future__ import annotations

from tests.oracle.idioms import basics, gradients, loops, modules, reading, saving, units, writing

__all__ = ["basics", "gradients", "loops", "modules", "reading", "saving", "units", "writing"]
