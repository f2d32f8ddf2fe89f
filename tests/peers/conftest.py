from __future__ import annotations

from tests.distributed.conftest import worlds

__all__ = ["worlds"]
