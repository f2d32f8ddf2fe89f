"""Signatures as a caller sees them: a parameter of type Never, which catches misspelled options, is none."""

from __future__ import annotations

from typing import Any

import griffe


class WithoutNever(griffe.Extension):
    """Leaves such parameters out."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        func.parameters = griffe.Parameters(*(one for one in func.parameters if str(one.annotation) != "Never"))
