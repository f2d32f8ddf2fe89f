"""File systems that hosts of a network share: sshfs and GlusterFS, real ones, served by the first host.

Neither needs a daemon of the system: sshfs talks to an sftp-server behind a socket, and GlusterFS's server and clients
are told by volume files what they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.nodes import Host, Network

PORT = 2222
SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
MOUNTED_S = 30.0
_SFTP = f"""\
import os, socket, subprocess
server = socket.create_server(("", {PORT}))
while True:
    client, _ = server.accept()
    subprocess.Popen(["{SFTP_SERVER}"], stdin=client, stdout=client)
    client.close()
"""
_BRICK = f"""\
volume brick
    type storage/posix
    option directory {{directory}}
end-volume
volume locks
    type features/locks
    subvolumes brick
end-volume
volume server
    type protocol/server
    option transport-type tcp
    option transport.socket.listen-port {PORT}
    option auth.addr.locks.allow *
    subvolumes locks
end-volume
"""
_CLIENT = f"""\
volume client
    type protocol/client
    option transport-type tcp
    option remote-host {{address}}
    option remote-port {PORT}
    option remote-subvolume locks
end-volume
"""


def missing(kind: str) -> str | None:
    """Why a kind, "sshfs" or "glusterfs", cannot be had here; None: it can."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    needed = ["sshfs"] if kind == "sshfs" else ["glusterfs", "glusterfsd"]
    absent = [tool for tool in needed if shutil.which(tool) is None]
    if kind == "sshfs" and not SFTP_SERVER.exists():
        absent.append(str(SFTP_SERVER))
    return f"there is no {' or '.join(absent)}" if absent else None


@contextmanager
def shared(kind: str, network: Network, folder: Path) -> Iterator[Callable[[Host], Path]]:
    """A directory of the first host's that all hosts mount. Yields: where each host has it."""
    brick, log = folder / "brick", folder / "mounts.txt"
    brick.mkdir()
    first = network.hosts[0]
    with ExitStack() as undo:
        if kind == "sshfs":
            server = first.start(sys.executable, "-c", _SFTP, output=log)
        else:
            (folder / "brick.vol").write_text(_BRICK.format(directory=brick))
            (folder / "client.vol").write_text(_CLIENT.format(address=first.address))
            server = first.start(
                "glusterfsd", "-N", "-f", str(folder / "brick.vol"), "-l", str(folder / "brick.log"), output=log
            )
        undo.callback(server.wait)
        undo.callback(server.kill)
        _wait_until(lambda: _listens(first, log), log)
        for host in network.hosts:
            place = _mounted(host, folder)
            place.mkdir()
            if kind == "sshfs":
                options = f"directport={PORT},dir_cache=no,entry_timeout=0,attr_timeout=0,negative_timeout=0"
                command = ["sshfs", "-f", "-o", options, f"{first.address}:{brick}", str(place)]
            else:
                times = ["--attribute-timeout=0", "--entry-timeout=0"]
                volume = ["-f", str(folder / "client.vol"), "-l", str(folder / f"client{host.number}.log")]
                command = ["glusterfs", "-N", *times, *volume, str(place)]
            client = host.start(*command, output=log)
            undo.callback(client.wait)
            undo.callback(client.kill)
            undo.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
            _wait_until(place.is_mount, log)
        yield lambda host: _mounted(host, folder)


def _mounted(host: Host, folder: Path) -> Path:
    return folder / f"mounted{host.number}"


def _listens(host: Host, log: Path) -> bool:
    asked = f"import socket; socket.create_connection(('{host.address}', {PORT}), 1)"
    return host.start(sys.executable, "-c", asked, output=log).wait(10) == 0


def _wait_until(holds: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + MOUNTED_S
    while not holds():
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.1)
