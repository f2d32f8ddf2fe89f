"""Interrupts at every instruction of a store, and thousands of real ones: it goes on, or says why not."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offload import interrupts
from offload.io.threads import ThreadEngine
from offload.storage.chunk_cache import Use
from tests.storage.test_store import (
    NUMELS,
    interrupted_store,
    store_on,
    use_all,
    value_in,
)
from tests.support.interrupted import interrupt, thrown_in

SHARES = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", [frozenset[int](), frozenset({1, 4})])
@pytest.mark.parametrize("by", [interrupt, thrown_in])
@pytest.mark.parametrize("share", range(SHARES))
def test_a_store_goes_on_after_an_interrupt_at_any_instruction(
    tmp_path: Path, kept: frozenset[int], by: Callable[[], None], share: int
) -> None:
    instruction = 1 + share
    while not interrupted_store(tmp_path / "run", kept, instruction, by):
        instruction += SHARES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_store_goes_on_after_thousands_of_real_interrupts(tmp_path: Path) -> None:
    engine, came, is_over, armed = ThreadEngine(), 0, threading.Event(), threading.Event()
    chance = random.Random(0)

    def send() -> None:
        while not is_over.wait(chance.uniform(0, 0.002)):
            os.kill(os.getpid(), signal.SIGINT)

    def handler(number: int, frame: object) -> None:
        if armed.is_set():  # so that none hits this test's own lines
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    interrupts.hold()
    sender = threading.Thread(target=send)
    sender.start()
    with store_on(engine, tmp_path / "run") as store:
        try:
            while came < 10_000:
                try:
                    armed.set()
                    use_all(store, came + 1)
                    armed.clear()
                except KeyboardInterrupt:
                    came += 1
        finally:
            is_over.set()
            sender.join()
            interrupts.give_back()
            signal.signal(signal.SIGINT, before)
        use_all(store, 99_999)
        for index in range(len(NUMELS)):
            with store.lease(index, Use.READ, step=100_000) as lease:
                assert value_in(lease) == 99_999
    engine.close()
