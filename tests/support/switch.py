"""A switch between network namespaces that delays what it carries: `python switch.py SOCKET TAP ...`.

It makes the TAP devices, prints a line when they are there, and forwards their Ethernet frames until its standard input
ends. A frame arrives `delay` seconds after it was sent. Nothing of the kernel's is needed but TAP: not every kernel has
netem. SOCKET takes one command a connection, and answers it: `delay SECONDS`, `cut TAP` (nothing goes in or out,
and nobody is told), `join TAP`.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import time
from itertools import count
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_MOST_BYTES = 1 << 16
_GROUP_BIT = 1
"""Of an address's first byte: the frame is for several hosts."""


def command(path: Path, text: str) -> None:
    """Has a switch do something, and waits until it has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.connect(str(path))
        one.sendall(text.encode())
        answer = one.recv(100)
    assert answer == b"done", answer


def _open(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


class _Switch:
    def __init__(self, names: list[str]) -> None:
        self.taps = {_open(name): name for name in names}
        self._delay_s = 0.0
        self._cut: set[str] = set()
        self._ports: dict[bytes, int] = {}  # by the address behind it
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()

    def wait_s(self) -> float | None:
        return max(self._late[0][0] - time.monotonic(), 0) if self._late else None

    def take(self, tap: int) -> None:
        while True:
            try:
                frame, now = os.read(tap, _MOST_BYTES), time.monotonic()
            except BlockingIOError:
                return
            except OSError:  # its namespace is gone
                del self.taps[tap]
                return
            else:
                self._ports[frame[6:12]] = tap
                known = None if frame[0] & _GROUP_BIT else self._ports.get(frame[:6])
                for target in self.taps if known is None else [known]:
                    if target != tap and target in self.taps and not {self.taps[tap], self.taps[target]} & self._cut:
                        heapq.heappush(self._late, (now + self._delay_s, next(self._numbers), target, frame))

    def deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            *_, target, frame = heapq.heappop(self._late)
            with contextlib.suppress(OSError):  # its device is down, or takes no more: the frame is lost
                os.write(target, frame)

    def obey(self, text: str) -> None:
        what, value = text.split()
        if what == "delay":
            self._delay_s = float(value)
        elif what == "cut":
            self._cut.add(value)
        else:
            self._cut.discard(value)


def main(path: str, *names: str) -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a late switch would be a longer delay
    switch = _Switch(list(names))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([*switch.taps, server, sys.stdin], [], [], switch.wait_s())
            switch.deliver()
            if sys.stdin in ready:
                return
            if server in ready:
                client = server.accept()[0]
                with client:
                    switch.obey(client.recv(1000).decode())
                    client.sendall(b"done")
            for tap in ready:
                if tap in switch.taps:
                    switch.take(tap)


if __name__ == "__main__":
    main(*sys.argv[1:])
