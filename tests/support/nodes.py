"""Machines that are network namespaces of this one, with a slow link between them; torchrun on each."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from tests.support.processes import ROOT

PORT = 29400
_NUMBERS = count()


class Node:
    """One of two machines. Attributes: address; output: of all that runs there."""

    def __init__(self, name: str, device: str, address: str, output: Path) -> None:
        self._name = name
        self._device = device
        self.address = address
        self.output = output
        self._agent: subprocess.Popen[bytes] | None = None

    def torchrun(self, script: Path, *arguments: str, host: str, nodes: str, restarts: int = 5) -> None:
        """Starts an agent of torchrun. Args: host: the address of the rendezvous; nodes: "least:most"."""
        options = {
            "nnodes": nodes,
            "nproc-per-node": "1",
            "max-restarts": str(restarts),
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{host}:{PORT}",
            "rdzv-id": "offload",
            # A node counts as gone after three seconds, and nobody waits for another one for longer than two. The name
            # of this machine says nothing of the addresses of its namespaces.
            "rdzv-conf": "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,"
            f"is_host={host == self.address}",
            "local-addr": self.address,
        }
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self._device, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        # Otherwise a node that comes back waits forever for an address that torch has told the first round only (2.13).
        environment |= {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.output.open("ab") as output:
            self._agent = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._name, sys.executable, "-m", "torch.distributed.run"),
                    *(f"--{name}={value}" for name, value in options.items()),
                    *(str(script), *arguments),
                ],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def wait(self, timeout_s: float) -> int:
        """The agent's exit status. Raises: subprocess.TimeoutExpired."""
        assert self._agent is not None
        return self._agent.wait(timeout_s)

    def limit(self, rate: str) -> None:
        """What the machine sends a second, as tc writes it."""
        how = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        _run("tc", "-n", self._name, "qdisc", "replace", "dev", self._device, "root", *how)

    def cut_off(self) -> None:
        """As when the machine loses power: nothing comes from it any more, and nobody is told."""
        _run("ip", "-n", self._name, "link", "set", self._device, "down")
        self.kill()

    def connect(self) -> None:
        """Undoes `cut_off`."""
        _run("ip", "-n", self._name, "link", "set", self._device, "up")

    def kill(self) -> None:
        """As when the machine stops: SIGKILL to all that runs there."""
        while pids := self._processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        if self._agent is not None:
            self._agent.wait(10)

    def _processes(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self._name).split()]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def missing() -> str | None:
    """Why there can be no such machines here; None: there can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no ip or tc (iproute2)"
    try:
        with tempfile.TemporaryDirectory() as scratch, two_nodes(Path(scratch)):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def two_nodes(logs: Path) -> Iterator[tuple[Node, Node]]:
    """Two machines that reach each other, and nobody else. All that runs there is killed at the end.

    Args: logs: a directory for their outputs.
    """
    unique = f"{os.getpid()}-{next(_NUMBERS)}"
    names = [f"offload-{unique}-{number}" for number in range(2)]
    devices, addresses = ("link0", "link1"), ("10.77.0.1", "10.77.0.2")
    with ExitStack() as undo:
        for name in names:
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "delete", name)
        first, second = (("netns", name) for name in names)
        _run("ip", "link", "add", devices[0], *first, "type", "veth", "peer", "name", devices[1], *second)
        nodes = []
        for name, device, address in zip(names, devices, addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            for link in ("lo", device):
                _run("ip", "-n", name, "link", "set", link, "up")
            nodes.append(Node(name, device, address, logs / f"node{len(nodes)}.txt"))
            undo.callback(nodes[-1].kill)
            nodes[-1].limit("50mbit")
        yield nodes[0], nodes[1]
