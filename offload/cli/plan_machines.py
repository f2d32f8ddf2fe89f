"""`offload plan --machine list`: the machines that come with the package, as a table."""

from __future__ import annotations

from offload.cli.console import plain_console, print_json, say, show_table
from offload.planner.machine_file import Machine, ready_made
from offload.sizes import format_bytes


def show_machines(*, json: bool) -> None:
    """Prints them.

    Args:
        json: whether to print one JSON object, with all figures and where they are from.
    """
    known = ready_made()
    if json:
        import msgspec

        print_json({"machines": {name: msgspec.to_builtins(machine) for name, machine in known.items()}})
        return
    from rich.table import Table

    console = plain_console()
    table = Table("--machine", "device", "bf16", "link", "RAM", "drives", "together", "may be written")
    for name, machine in known.items():
        table.add_row(name, *_cells(machine))
    show_table(console, table)
    say(console, "Nothing of this was measured: the files say where each figure is from. `--json` shows them.")


def _cells(machine: Machine) -> list[str]:
    device, link, disk = machine.device, machine.link, machine.disk
    product = machine.products.get("bf16")
    return [
        "the CPU" if device is None else f"{device.name}, {format_bytes(device.memory.number)}",
        "-" if product is None else f"{product.value / 1e12:.3g} TFLOP/s",
        "-" if link is None else f"{link.up.value / 1e9:.3g} GB/s",
        format_bytes(machine.ram.number),
        ", ".join(f"{drive.count} x {drive.name}" for drive in machine.drives) or "-",
        "-" if disk is None else f"{disk.value / 1e9:.3g} GB/s",
        "-" if machine.endurance is None else f"{machine.endurance / 1e12:,.0f} TB",
    ]
