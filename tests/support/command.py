"""The installed command, called in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import Result


def printed(result: Result) -> dict[str, Any]:
    """The one JSON object that a call with --json has printed; it has to have succeeded."""
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found
