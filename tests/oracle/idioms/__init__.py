"""All idioms: importing this package registers them."""

from __future__ import annotations

__all__ = ["basics", "gradients", "loops", "modules", "reading", "saving", "writing"]
