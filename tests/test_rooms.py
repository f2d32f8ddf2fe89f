"""Imports go one way between rooms, and special modules are known to one room only. Read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import offload

ROOT = Path(offload.__file__).parent

FLOORS = [
    ["errors", "torch_2_11", "torch_private", "sizes", "interrupts", "tiers", "regions"],
    ["options", "choices", "layout", "profiling", "entries", "health"],
    ["native", "io"],
    ["devices", "storage", "ranks"],
    ["run"],
    ["grads", "optim"],
    ["model"],
    ["planner", "checkpoint"],
    ["build", "held_model"],
    ["optimizer"],
    ["demo", "integrations", "cli"],
]
"""Files and folders of offload/, from the ground up: each may import lower ones, and those before it on its floor."""

ONLY_USED_BY = {
    "ctypes": {"native", "io", "torch_2_11"},
    "torch.distributed": {"ranks"},
    "torch.cuda": {"devices"},
    "aiofiles": {"io"},
}
"""Modules that one room alone may know (the doctor only asks whether there is a GPU)."""


REACHES_FILES = {"io/files.py", "io/engine.py", "io/threads.py", "io/portable.py", "io/io_uring.py"}
"""`Files` and the I/O engines. In the rooms of HAVE_FILES nobody else calls the file system."""

HAVE_FILES = {"io", "storage", "run", "planner", "checkpoint", "build", "optimizer"}
"""The others have no files of a run: the kernel's, the user's weights, what a command was asked to write."""

OF_NO_FILE = {"getpid", "geteuid", "getenv", "fsdecode", "fspath", "strerror", "sysconf", "register_at_fork"}
"""Functions of `os` that reach no file."""

OF_A_PATH = {
    *("chmod", "exists", "expanduser", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat"),
    *(
        "mkdir",
        "open",
        "read_bytes",
        "read_text",
        "readlink",
        "rename",
        "resolve",
        "rglob",
        "rmdir",
        "samefile",
        "stat",
        "symlink_to",
    ),
    *("touch", "unlink", "walk", "write_bytes", "write_text"),
}
"""Methods of a pathlib.Path that reach a file."""

OPENS = {"open", "open_nofollow", "open_follow", "open_directory", "open_file"}
"""Functions that open a file, of Python and of io/engine.py."""

OURS = {"files", "_files", "disk", "_disk", "LOCAL", "engine", "snapshot", "copied", "transfer"}
"""What has methods of such names, and is no path: `Files`, and other objects of ours."""


def places() -> dict[str, tuple[int, int]]:
    return {name: (number, place) for number, floor in enumerate(FLOORS) for place, name in enumerate(floor)}


def sources() -> list[tuple[str, Path]]:
    """(room, file) for every file of the package but its own __init__."""
    return [
        (path.relative_to(ROOT).parts[0].removesuffix(".py"), path)
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"
    ]


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All that a file consists of. Parsed once: six tests look through the whole package."""
    return [*ast.walk(ast.parse(path.read_text()))]


@pytest.fixture(autouse=True, scope="module")
def _forget_nodes() -> Iterator[None]:
    """Or each later collection of garbage in this process would look through them."""
    yield
    nodes_of.cache_clear()


def imports(path: Path) -> list[str]:
    """Full names of everything a file imports, anywhere in it."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_every_file_has_a_floor() -> None:
    assert {room for room, _ in sources()} <= set(places())


def test_imports_go_only_downwards() -> None:
    floor = places()
    wrong = []
    for room, path in sources():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "offload":
                continue
            # `from offload import OffloadZero`
            other = parts[1] if parts[1] in floor else "optimizer"
            if other != room and floor[other] >= floor[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_demo_has_only_what_every_user_has() -> None:
    """Names that `offload` exports, and no private attribute of another object: it is an example, too."""
    public = {f"offload.{name}" for name in offload.__all__}
    wrong = []
    for path in sorted((ROOT / "demo").glob("*.py")):
        where = path.relative_to(ROOT)
        ours = [name for name in imports(path) if name.split(".")[0] == "offload"]
        wrong += [
            f"{where} imports {name}" for name in ours if not name.startswith("offload.demo.") and name not in public
        ]
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and ast.unparse(node.value) != "self":
                wrong.append(f"{where}:{node.lineno} uses {ast.unparse(node)}")
    assert not wrong


def test_special_modules_are_known_to_one_room_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, path in sources()
        for name in imports(path)
        for special, rooms in ONLY_USED_BY.items()
        if (name == special or name.startswith(special + ".")) and room not in rooms
    ]
    assert not wrong


def test_only_devices_knows_one_kind_of_accelerator_and_streams() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for room, path in sources()
        if room != "devices" and re.search(r"torch\.(cuda|xpu)\b|torch\.(Stream|Event)\b|cudart", path.read_text())
    ]
    assert not wrong


def test_only_torch_private_touches_what_torch_keeps_to_itself() -> None:
    """Private modules and functions of torch; private attributes of its objects (`_version`, `_parameters`) aside."""
    private = re.compile(r"torch\._[A-Za-z]|torch(\.\w+)*\._\w+ import|from torch[\w.]* import .*\b_[A-Za-z]")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for room, path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if room != "torch_private" and private.search(line)
    ]
    assert not wrong


PLAINLY_ENTERED = {"PastSubclasses", "DisableTorchFunction", "inference_mode"}
"""Context managers of torch_private that a `with` has to enter itself."""


def test_what_turns_torch_functions_off_is_known_to_one_file_and_entered_by_a_plain_with() -> None:
    """Through an ExitStack an interrupt could come after its entry, and before anybody knows the exit."""
    wrong = []
    for room, path in sources():
        nodes = nodes_of(path)
        entered = {
            item.context_expr.func
            for node in nodes
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
        }
        for node in nodes:
            if not isinstance(node, ast.Attribute) or room == "torch_private":
                continue
            is_ours = node.attr in PLAINLY_ENTERED and ast.unparse(node.value) == "torch_private"
            if node.attr == "DisableTorchFunctionSubclass" or (is_ours and node not in entered):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


MOST_ARGUMENTS = 7
"""Of a constructor. OffloadZero has one for each option."""


def test_no_constructor_takes_many_arguments() -> None:
    wrong = []
    for _, path in sources():
        for node in nodes_of(path):
            if not isinstance(node, ast.ClassDef) or node.name == "OffloadZero":
                continue
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    given = made.args.posonlyargs + made.args.args + made.args.kwonlyargs
                    if len(given) - 1 > MOST_ARGUMENTS:
                        wrong.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not wrong


def test_nobody_below_the_planner_sees_what_the_user_said() -> None:
    """They get choices. Who shares the file of the options for a path or for `Tuning` names that alone."""
    above = {"planner", "build", "optimizer", "cli"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for room, path in sources()
        for name in imports(path)
        if name.startswith("offload.options") and room not in above and name != "offload.options.absolute"
    ]
    assert not wrong


def test_choices_are_made_in_one_place() -> None:
    """But for those with which activations are measured, before anything is decided."""
    makers = {"planner/decide.py", "planner/activations.py", "choices.py"}
    wrong = [
        f"{path.relative_to(ROOT)} makes a {node.func.id}"
        for _, path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and re.fullmatch(r"\w*Choice", node.func.id)
        if str(path.relative_to(ROOT)) not in makers
    ]
    assert not wrong


def _calls_of_the_file_system(path: Path) -> list[str]:
    """Where a file calls it: functions of os, fcntl and shutil, `open`, and methods of paths."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            found += [f"{node.lineno}: imports {name}" for name in names & {"fcntl", "shutil", "tempfile", "glob"}]
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            wrong = called.id in OPENS
        elif isinstance(called, ast.Attribute) and ast.unparse(called.value).startswith("os"):
            wrong = ast.unparse(called.value) in {"os", "os.path"} and called.attr not in OF_NO_FILE
        elif isinstance(called, ast.Attribute):
            wrong = called.attr in OF_A_PATH and ast.unparse(called.value).rpartition(".")[2] not in OURS
        else:
            wrong = False
        found += [f"{node.lineno}: {ast.unparse(called)}"] if wrong else []
    return found


def test_only_files_and_engines_reach_the_file_system() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call}"
        for room, path in sources()
        if room in HAVE_FILES and str(path.relative_to(ROOT)) not in REACHES_FILES
        for call in _calls_of_the_file_system(path)
    ]
    assert not wrong
