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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.support import switch
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


class Host:
    """A machine behind a switch. Attributes: number; address; device: its network interface."""

    def __init__(self, number: int, name: str, device: str, address: str, control: Path) -> None:
        self.number = number
        self.address = address
        self.device = device
        self._name = name
        self._control = control

    def start(
        self, *command: str, output: Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Starts a process there. Args: output: gets what it says, after what is there; environment: beside ours."""
        surroundings = os.environ | {"GLOO_SOCKET_IFNAME": self.device, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with output.open("ab") as file:
            return subprocess.Popen(  # not `ip netns exec`, whose mounts nobody else would see
                ["nsenter", f"--net=/run/netns/{self._name}", *command],
                stdout=file,
                stderr=file,
                env=surroundings | environment,
                cwd=cwd,
            )

    def cut_off(self) -> None:
        """Nothing it sends arrives, and nothing reaches it; nobody is told."""
        switch.command(self._control, f"cut {self.device}")

    def connect(self) -> None:
        """Undoes `cut_off`."""
        switch.command(self._control, f"join {self.device}")

    def kill(self) -> None:
        """As when the machine loses power: SIGKILL to all that runs there, behind a cut cable."""
        self.cut_off()
        while pids := [int(pid) for pid in _run("ip", "netns", "pids", self._name).split()]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@dataclass(frozen=True)
class Network:
    """Hosts that reach one another through a switch, and nobody else. Attributes: hosts; control: of the switch."""

    hosts: list[Host]
    control: Path

    def delay(self, seconds: float) -> None:
        """What arrives takes so long from now on."""
        switch.command(self.control, f"delay {seconds}")


@contextmanager
def network(size: int, folder: Path) -> Iterator[Network]:
    """Machines behind a switch. All that runs there is killed at the end.

    Args: folder: for the switch's socket, whose name must not be longer than about 100 bytes.
    """
    unique = f"{os.getpid()}-{next(_NUMBERS)}"
    devices = [f"of{unique[-9:]}h{number}" for number in range(size)]
    control = folder / "switch"
    with ExitStack() as undo:
        tool = subprocess.Popen(
            [sys.executable, switch.__file__, str(control), *devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        undo.callback(tool.wait)
        assert tool.stdin is not None
        assert tool.stdout is not None
        undo.enter_context(tool.stdout)
        undo.callback(tool.stdin.close)
        if tool.stdout.readline() != b"ready\n":
            raise subprocess.CalledProcessError(tool.wait(), ["switch"], stderr="/dev/net/tun could not be used")
        hosts = []
        for number, device in enumerate(devices):
            name, address = f"offload-{unique}-h{number}", f"10.78.0.{number + 1}"
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "delete", name)
            _run("ip", "link", "set", device, "netns", name, "mtu", "9000")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
            for link in ("lo", device):
                _run("ip", "-n", name, "link", "set", link, "up")
            hosts.append(Host(number, name, device, address, control))
            undo.callback(hosts[-1].kill)
        yield Network(hosts, control)


@functools.cache
def no_network() -> str | None:
    """Why there can be no such network here; None: there can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "there is no ip (iproute2) or nsenter (util-linux)"
    try:
        with tempfile.TemporaryDirectory() as scratch, network(2, Path(scratch)):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))}: {(error.stderr or '').strip()}"
