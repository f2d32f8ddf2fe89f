"""The only file that knows torch.distributed. See [Note: collectives] in communicator.py."""

from __future__ import annotations

import inspect
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from offload import torch_2_11, torch_private
from offload.errors import ConfigError, RankError
from offload.health import Health, PartHealth
from offload.interrupts import uninterrupted
from offload.profiling import COLLECTIVES, Event, Timeline
from offload.ranks.communicator import (
    Communicator,
    SingleOfSlice,
    SingleProcess,
    Work,
    average,
    check_gather,
    check_reduction,
    check_source,
    describe,
)
from offload.ranks.launch import launched, rank_on_node

TIMEOUT_S = 600.0
"""Seconds after which a collective counts as failed."""

_SHORTEST_SLEEP_S = 2e-5
_LONGEST_SLEEP_S = 1e-3
_GRACE_S = 1.0
"""For collectives under way at the end: they complete, unless another rank has failed."""


class _Shared:
    """What a group shares with its sub-groups. After a collective failed on one of them, none is possible on any.

    Attributes:
        health: whether a collective has failed.
        counts: what was sent, as `stats` returns it.
        under_way: the collectives that were launched and may not have completed.
    """

    def __init__(self, health: PartHealth) -> None:
        self.health = health
        self.counts: Counter[str] = Counter()
        self.under_way: list[_GroupWork] = []


class Group(Communicator):
    """The ranks of a torch.distributed process group: NCCL for tensors on CUDA devices, gloo for those on the CPU.

    The group is used as it is; the user's own collectives may come between ours. If a rank is stuck, this raises
    RankError after `timeout_s`, but the backend goes on until the group's own timeout: until then gloo's threads keep
    the process from ending, and after it NCCL's watchdog kills it.

    Args:
        members: the process group; None: all ranks.
        timeout_s: how many seconds after the launch of a collective RankError is raised. None: TIMEOUT_S, or the
            group's own timeout where that is shorter.
        timeline: records the collectives; None: nobody reads what is recorded.
        shard_group: the ranks among which the parameters are sharded; None: all members. What it sends is counted here,
            too.
        replicate_group: the ranks that keep the same shards; None: this rank alone. What it sends is counted here, too.
        health: the health of the run; None: the group serves no run.
        user_ranks: see Communicator; None: the numbers in the group.
    """

    def __init__(
        self,
        members: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        timeline: Timeline | None = None,
        shard_group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        health: Health | None = None,
        user_ranks: Sequence[int] | None = None,
    ) -> None:
        local_rank, ranks_on_node = rank_on_node(os.environ, dist.get_rank(), dist.get_world_size())
        super().__init__(dist.get_rank(members), dist.get_world_size(members), local_rank, ranks_on_node)
        if user_ranks is not None:
            self.user_ranks = user_ranks
        backends = dist.get_backend_config(members)
        self._group = members
        self._health = health
        self._ranks = dist.get_process_group_ranks(members)
        self._host = torch.device("cpu" if "cpu" in backends else backends.partition(":")[0])
        own_s = torch_private.timeout_s(members or dist.group.WORLD, self._host)
        self.timeout_s = min(own_s or TIMEOUT_S, TIMEOUT_S) if timeout_s is None else timeout_s
        self._timeline = timeline or Timeline()
        self._shared = _Shared((health or Health()).part())
        self._dimensions = shard_group, replicate_group
        self._shard_group, self._replicate_group = self._subgroup(shard_group), self._subgroup(replicate_group)
        self._tensor_parallel: Communicator | None = None
        self._everyone: Group | None = None
        self._own: dist.ProcessGroup | None = None  # made here, to be taken away at the end
        self._live_groups = 0  # when it had been made
        self._side_group: Communicator | None = None
        self._ends = math.inf

    def in_order(self, user_ranks: Sequence[int]) -> Communicator | None:
        shard_group, replicate_group = self._dimensions
        if self._tensor_parallel is not None or self._everyone is not None:
            return None
        ordered = [self._ranks[rank] for rank in user_ranks]
        if shard_group is not None:
            # Whole rows, as machines are: the ranks of each shard its parameters among themselves, in their order.
            row = dist.get_world_size(shard_group)
            if any(rank - number % row != user_ranks[number - number % row] for number, rank in enumerate(user_ranks)):
                return None
            if any(rank % row for rank in user_ranks[::row]):
                return None
            if len(ordered) > row:
                replicate_group = self._another(ordered[self.rank % row :: row])
        group = Group(
            self._another(ordered),
            timeout_s=self.timeout_s,
            timeline=self._timeline,
            shard_group=shard_group,
            replicate_group=replicate_group,
            health=self._health,
            user_ranks=tuple(user_ranks),
        )
        group._shared = self._shared
        for part in (group._shard_group, group._replicate_group):
            if isinstance(part, Group):
                part._shared = self._shared
        return group

    def _subgroup(self, members: dist.ProcessGroup | None) -> Communicator | None:
        if members is None:
            return None
        if dist.get_world_size(members) == 1:
            return SingleProcess(self.local_rank, self.ranks_on_node)
        is_whole = dist.get_world_size(members) == self.size
        user_ranks = self.user_ranks if is_whole else None
        group = Group(members, timeout_s=self.timeout_s, timeline=self._timeline, user_ranks=user_ranks)
        group._shared = self._shared
        return group

    @property
    def shard_group(self) -> Communicator:
        return self._shard_group or super().shard_group

    @property
    def replicate_group(self) -> Communicator:
        return self._replicate_group or super().replicate_group

    @property
    def tensor_parallel(self) -> Communicator:
        return self._tensor_parallel or super().tensor_parallel

    @property
    def everyone(self) -> Communicator:
        return self._everyone or self

    def joined_by(self, tensor_parallel: dist.ProcessGroup, everyone: dist.ProcessGroup) -> Communicator:
        """Makes this group a slice of a model that tensor-parallel ranks share.

        Args:
            tensor_parallel: the ranks that have the parts of one model, this one among them.
            everyone: the ranks of all slices.

        Returns:
            This group.
        """
        self._tensor_parallel, self._everyone = (
            self._subgroup(tensor_parallel),
            Group(everyone, timeout_s=self.timeout_s, timeline=self._timeline),
        )
        self._everyone._shared = self._shared
        return self

    @property
    def side_group(self) -> Communicator:
        if self._side_group is None:
            made = self._another(self._ranks)
            self._own, self._side_group = made, self._subgroup(made)
            self._live_groups = torch_private.live_groups()
        assert self._side_group is not None
        return self._side_group

    def _another(self, ranks: list[int]) -> dist.ProcessGroup:
        """Makes another process group of all members. Each of them has to call it.

        Args:
            ranks: the members, in the order of the group.

        Raises:
            RankError: another rank failed, or cannot be reached.
        """
        self.check()
        began = time.monotonic()
        try:
            backends = dist.get_backend_config(self._group)
            names = {backend.split(":")[1] for backend in backends.split(",")}
            # One for all devices is called by its name: torch warns about others.
            return _another(ranks, names.pop() if len(names) == 1 else backends, self.timeout_s + _GRACE_S)
        except RuntimeError as error:
            raise self.fail("new_group", time.monotonic() - began, str(error)) from error

    def reduce_scatter(self, full: Tensor, out: Sequence[Tensor], *, scratch: Tensor | None = None) -> Work:
        check_reduction(full, out, scratch, self.size)
        received = torch.empty_like(full) if scratch is None else scratch
        return self._launch(
            "reduce_scatter",
            lambda: dist.all_to_all_single(_bytes(received), _bytes(full), group=self._group, async_op=True),
            full,
            full.numel() - full.numel() // self.size,
            finish=lambda: average(received.view(self.size, -1), out, self.user_ranks),
        )

    def all_gather_into_tensor(self, shard: Tensor, out: Tensor) -> Work:
        check_gather(shard, out, self.size)
        sent_numel = out.numel() - shard.numel()
        return self._launch("all_gather", lambda: _all_gather(out, shard, self._group), out, sent_numel)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        check_source(source, self.size)
        if not tensor.is_contiguous():
            raise ValueError(f"tensor has to be contiguous, not {describe(tensor)}")
        sent = tensor.detach().to(self._host) if tensor.is_cpu else tensor.detach()
        self._launch(
            "broadcast",
            lambda: dist.broadcast(_bytes(sent), self._ranks[source], group=self._group, async_op=True),
            sent,
            tensor.numel() * (self.size - 1) if self.rank == source else 0,
        ).wait()
        if sent.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(sent)

    def exchange(self, sent: Tensor, target: int, received: Tensor, source: int) -> None:
        out, own = received.to(self._host), sent.to(self._host)
        outs, ins = ([0] * self.size for _ in range(2))
        outs[source], ins[target] = len(out), len(own)
        self._launch(
            "exchange",
            lambda: dist.all_to_all_single(out, own, outs, ins, group=self._group, async_op=True),
            own,
            len(own),
        ).wait()
        if out.data_ptr() != received.data_ptr():
            received.copy_(out)

    def all_gather(self, values: Tensor) -> Tensor:
        if values.dim() != 1 or not values.is_cpu:
            raise ValueError(f"values has to be a 1-D CPU tensor, not {describe(values)}")
        own = values.contiguous().to(self._host)
        rows = own.new_empty(self.size * own.numel())
        sent_numel = rows.numel() - own.numel()
        self._launch("gather", lambda: _all_gather(rows, own, self._group), rows, sent_numel).wait()
        return rows.cpu().view(self.size, -1)

    def stats(self) -> dict[str, int]:
        return dict(self._shared.counts)

    def close(self) -> bool:
        self._ends = min(self._ends, time.monotonic() + _GRACE_S)
        quiet = [work.arrives_by(self._ends) for work in self._shared.under_way]
        if self._everyone is not None:
            self._everyone.close()
        # Unless it is of the whole world, a group is named by its ranks and by how many groups there are. If it went,
        # or another that was made before it, the next of the same ranks would get the name of one that was there, and
        # would meet at its addresses.
        is_newest = torch_private.live_groups() == self._live_groups
        if (
            self._own is not None
            and _is_whole(self._ranks)
            and is_newest
            and self._shared.health.is_sound
            and all(quiet)
        ):
            dist.destroy_process_group(self._own)
            self._own = None
        return all(quiet)

    def check(self) -> None:
        """Raises the failure of an earlier collective, if there was one.

        Raises:
            RankError: a collective failed before.
        """
        self._shared.health.check()

    def require_device(self, device: torch.device) -> None:
        current = None if device.type == "cpu" else torch.accelerator.current_device_index()
        require_backend(dist.get_backend_config(self._group), device, current)

    def fail(self, name: str, waited_s: float, why: str) -> BaseException:
        """Takes note that a collective failed, after which no other is possible.

        Args:
            name: the collective.
            waited_s: seconds since its launch.
            why: what went wrong.

        Returns:
            The RankError that says so; the first one, if there was one before.
        """
        return self._shared.health.fail(
            RankError(
                f"{name} on rank {self.user_rank} of {self.size} failed after {waited_s:.1f} s ({why}): another rank "
                "is slow, stuck or dead: look for the first error in the ranks' logs; start again from the last commit"
                f"{_advice() if self.size > self.ranks_on_node else ''}",
                collective=name,
                waited_s=waited_s,
            )
        )

    @uninterrupted  # what is under way and not noted would not be waited for
    def _launch(
        self,
        name: str,
        exchange: Callable[[], Any],
        tensor: Tensor,
        sent_numel: int,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Launches a collective, and counts what it sends.

        Args:
            name: the collective's name.
            exchange: calls torch.distributed, and returns its work.
            tensor: one of the tensors that travel.
            sent_numel: how many elements this rank sends to others.
            finish: what remains to be done when all has arrived; None: nothing.

        Raises:
            RankError: an earlier collective failed, or this one could not be launched.
        """
        self.check()
        size = sent_numel * tensor.element_size()
        event = self._timeline.begin(COLLECTIVES, name, size=size)
        launched = time.monotonic()
        try:
            call: dist.Work | None = exchange()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.fail(name, time.monotonic() - launched, str(error)) from error
        if call is None:
            raise AssertionError(f"torch.distributed took {name} for one of a group without this rank")
        if event is not None and tensor.is_cpu:
            call.get_future().add_done_callback(lambda _: Timeline.end(None if event.ended else event))
        self._shared.counts.update({f"{name}_calls": 1, f"{name}_elements": sent_numel, f"{name}_bytes": size})
        work = _GroupWork(self, name, call, launched, finish, event, is_on_device=not tensor.is_cpu)
        self._shared.under_way = [other for other in self._shared.under_way if not other.done()] + [work]
        return work


class _GroupWork(Work):
    """A collective of a Group under way.

    Args:
        group: the group.
        name: the collective's name.
        call: torch.distributed's work.
        launched: when it was launched, by time.monotonic, in seconds.
        finish: what remains to be done when all has arrived; None: nothing.
        event: what the timeline records of it; None: nothing is recorded.
        is_on_device: whether the tensors are on a device with memory of its own.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        call: dist.Work,
        launched: float,
        finish: Callable[[], None] | None,
        event: Event | None,
        *,
        is_on_device: bool,
    ) -> None:
        self._group = group
        self._name = name
        self._call = call
        self._launched = launched
        self._is_on_device = is_on_device
        self._finish = finish
        self._event = event
        self._complete = False

    def done(self) -> bool:
        return self._complete or self._call.is_completed()

    def wait(self) -> None:
        if self._complete:
            return
        self._group.check()
        fault = self._fault()
        if fault is not None:
            Timeline.end(self._event, failed=True)
            raise self._group.fail(self._name, time.monotonic() - self._launched, fault)
        self._end()
        if self._event is not None and self._event.ended is None:
            Timeline.end(self._event)
        self._complete = True

    def wait_on_device(self) -> None:
        if not self._is_on_device:
            self.wait()
        elif not self._complete:
            self._group.check()
            try:
                self._call.wait()  # of the current stream
            except RuntimeError as error:
                Timeline.end(self._event, failed=True)
                raise self._group.fail(self._name, time.monotonic() - self._launched, str(error)) from error
            self._end()

    def _end(self) -> None:
        """Does what remains to be done, on the current stream."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _fault(self) -> str | None:
        """Waits for the collective.

        Returns:
            What went wrong, in words; None: nothing.
        """
        # Not in the backend's own wait: that one takes no Ctrl-C, and NCCL's does not wait for the ranks.
        if not self.arrives_by(self._launched + self._group.timeout_s):
            return "timed out"
        try:
            self._call.wait()
        except RuntimeError as error:
            return str(error)
        return None

    def arrives_by(self, deadline: float) -> bool:
        """Waits until the call has completed, well or not, or until `deadline`.

        Args:
            deadline: by time.monotonic, in seconds.

        Returns:
            Whether it has completed.
        """
        sleep_s = _SHORTEST_SLEEP_S
        while not self._call.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return True


def connect(
    process_group: object | None = None,
    *,
    timeout_s: float | None = None,
    timeline: Timeline | None = None,
    mesh: DeviceMesh | None = None,
    health: Health | None = None,
) -> Communicator:
    """The communicator of this process.

    Args:
        process_group: the data-parallel ranks, which hold one shard each, as a ProcessGroup or a DeviceMesh. Of a mesh
            of two dimensions the first is `replicate_group` and the second is `shard_group`, as FSDP2 has them. None:
            all ranks.
        timeout_s: as for Group.
        timeline: as for Group.
        mesh: the tensor-parallel ranks; None: the model has none.
        health: as for Group.

    Raises:
        ConfigError: `process_group` is neither a ProcessGroup nor a DeviceMesh, or is a mesh that cannot be used; this
            process is not in it; a launcher started several processes and nobody connected them; or data-parallel and
            tensor-parallel ranks are no rectangle.
    """
    if mesh is not None and mesh.size() > 1:
        return _connect_slice(process_group, mesh, timeout_s, timeline or Timeline(), health)
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ConfigError(f"process_group={process_group!r}: call torch.distributed.init_process_group() first")
        if launched(os.environ) > 1:
            raise ConfigError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but torch.distributed is not initialized, so each process "
                "would train alone: call torch.distributed.init_process_group() before OffloadZero(...)"
            )
        return SingleProcess()
    members, *dimensions = _members(process_group)
    if dist.get_world_size(members) == 1:
        return SingleProcess(*rank_on_node(os.environ, dist.get_rank(), dist.get_world_size()))
    replicate_group, shard_group = dimensions or (None, None)
    return Group(
        members,
        timeout_s=timeout_s,
        timeline=timeline,
        shard_group=shard_group,
        replicate_group=replicate_group,
        health=health,
    )


def _connect_slice(
    process_group: object | None, mesh: DeviceMesh, timeout_s: float | None, timeline: Timeline, health: Health | None
) -> Communicator:
    """The communicator of the data-parallel ranks of a slice. Every process of all slices has to call it.

    Raises:
        ConfigError: as for `connect`.
    """
    across, own = mesh.get_group(), dist.get_rank()
    members: dist.ProcessGroup | None = None
    dimensions: list[dist.ProcessGroup | None] = []
    if process_group is not None:
        members, *dimensions = _members(process_group)
    elif mesh.size() < dist.get_world_size():
        raise ConfigError(
            f"the model is sharded over {mesh.size()} of {dist.get_world_size()} ranks, and process_group does not say "
            'which ranks are data-parallel: give process_group=mesh["dp"], the other dimension of the mesh'
        )
    ranks = [own] if process_group is None else dist.get_process_group_ranks(members)
    peers = dist.get_process_group_ranks(across)
    if set(ranks) & set(peers) != {own}:
        raise ConfigError(
            f"process_group holds the ranks {ranks}, and the model is sharded over {peers}: of tensor-parallel ranks "
            'each has its own data-parallel ones, so give process_group=mesh["dp"], the other dimension of the mesh'
        )
    slices: list[Any] = [None] * len(peers)
    dist.all_gather_object(slices, ranks, group=across)
    position = ranks.index(own)
    is_rectangle = all(
        len(one) == len(ranks) and one[position] == peer for one, peer in zip(slices, peers, strict=True)
    )
    if not is_rectangle or len({rank for one in slices for rank in one}) != len(ranks) * len(peers):
        raise ConfigError(
            f"the tensor-parallel ranks {peers} were given the process groups {slices}: all of them together have to "
            "be a rectangle, as the dimensions of one mesh are"
        )
    ordered = [rank for one in slices for rank in one]
    # Every process makes the group that it is in, and no other: other models may be trained beside this one.
    everyone = across if ordered == peers else _new_group(ordered)
    assert isinstance(everyone, dist.ProcessGroup)
    if len(ranks) == 1:
        whole = Group(everyone, timeout_s=timeout_s, timeline=timeline, health=health)
        parts = whole._subgroup(across)
        assert parts is not None
        return SingleOfSlice(parts, whole)
    replicate_group, shard_group = dimensions or (None, None)
    slice_ = Group(
        members,
        timeout_s=timeout_s,
        timeline=timeline,
        shard_group=shard_group,
        replicate_group=replicate_group,
        health=health,
    )
    return slice_.joined_by(across, everyone)


def _members(process_group: object | None) -> list[dist.ProcessGroup | None]:
    """The process groups that a `process_group` names.

    Returns:
        The group of all ranks that hold shards (None: all ranks there are) and, with replicas, the replicate group and
        the shard group.

    Raises:
        ConfigError: it is neither a ProcessGroup nor a DeviceMesh, is a mesh that cannot be used, or this process is
            not in it.
    """
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"process_group: rank {dist.get_rank()} is not in it: give each rank the group it belongs to")
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return [process_group]
    if isinstance(process_group, DeviceMesh):
        return _members_of(process_group)
    raise ConfigError(f"process_group={process_group!r} is neither a ProcessGroup nor a DeviceMesh")


def _members_of(mesh: DeviceMesh) -> list[dist.ProcessGroup | None]:
    if mesh.get_coordinate() is None:
        raise ConfigError(f"process_group: rank {dist.get_rank()} is not in {mesh}: give each rank its own part")
    if mesh.ndim > 2:
        raise ConfigError(
            f"process_group is a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give the one over which the "
            'states are to be partitioned, such as mesh["dp"], or that and the one of replicas before it'
        )
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return [mesh.get_group(mesh.ndim - 1)]
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ConfigError(
            f"process_group is a mesh of the ranks {mesh.mesh.tolist()}: they have to count up along each row, and "
            "from one row to the next"
        )
    # Every process makes the groups that it is in, and no others: other meshes may lie beside this one.
    everyone = None if len(ranks) == dist.get_world_size() else dist.new_group(ranks, use_local_synchronization=True)
    return [everyone, mesh.get_group(0), mesh.get_group(1)]


def require_backend(backends: str, device: torch.device, current: int | None) -> None:
    """Checks that tensors on a device can travel in a process group.

    Args:
        backends: the backends of the group, by type of device, as in "cpu:gloo,cuda:nccl".
        device: the model's device.
        current: the number of the current accelerator; None: the device is the CPU.

    Raises:
        ConfigError: the group has no backend for the device, or only gloo for an accelerator; or the device is not the
            current accelerator.
    """
    by_type = dict(part.split(":") for part in backends.split(","))
    backend = by_type.get(device.type)
    if device.type != "cpu" and backend in (None, "gloo"):
        own = dist.get_default_backend_for_device(device)
        raise ConfigError(
            f"the model is on {device}, and the process group has {backends}: gradients travel by all-to-all, which "
            f'gloo has on the CPU only; call init_process_group("cpu:gloo,{device.type}:{own}")'
        )
    if backend is None:
        raise ConfigError(
            f"the model is on {device}, and the process group has {backends} only: call "
            'init_process_group("gloo"), or move the model to the device of this rank'
        )
    if device.type != "cpu" and device.index not in (None, current):
        raise ConfigError(
            f"the model is on {device}, and the current device is {device.type}:{current}: call "
            f"torch.accelerator.set_device_index({device.index}) before init_process_group()"
        )


def _new_group(ranks: list[int], **options: Any) -> object:
    """Makes a new group of `ranks`, in this order. All of them call this, and no other ranks do."""
    # One of the whole world gets a number, which is the same on all ranks. Any other is named by how many groups this
    # process has, and those that have another number of them do not meet.
    options["use_local_synchronization"] = not _is_whole(ranks)
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(ranks, sort_ranks=False, **options)
    return dist.new_group(torch_2_11.in_this_order(ranks), **options)


def _advice() -> str:
    """What helps where this machine tells the others an address of its own that they cannot reach."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    if named or not address.startswith("127."):
        return ""
    return (
        f"; the name of this machine leads to {address}, where no other machine reaches it: set GLOO_SOCKET_IFNAME to "
        "the network interface, such as eth0"
    )


def _is_whole(ranks: list[int]) -> bool:
    """Whether these are all ranks of the world, in any order."""
    return len(ranks) == dist.get_world_size()


def _another(ranks: list[int], backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Makes another group of `ranks`, in this order. All of them call this."""
    made = _new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    # The older name warns in newer versions, and is 2.5 times as slow on gloo.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(_bytes(out), _bytes(own), group=group, async_op=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
