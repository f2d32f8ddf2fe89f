"""Coverage-guided fuzzing of what is parsed from a disk, with atheris (libFuzzer): `make fuzz ARGS="--seconds 300"`.

It grows a set of inputs that reach new lines of the parsers, from a valid document of each kind. What a document's own
checksum or spelling would refuse at once is computed anew as well, so that what lies behind is reached. A finding is an
input for which a parser raises anything but an error of this library, takes a document that means another one, or takes
too long or too much memory. It is kept in tests/attacks/found, whose files `test_corpus.py` tries in every test run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

FOUND = Path(__file__).parent / "found"
KINDS = ("manifest", "commit", "superblock", "header", "extra", "base")
MOST_BYTES = 4096
TIMEOUT_S = 10
MEMORY_MIB = 2048


def variants(kind: str, data: bytes) -> Iterable[bytes]:
    """`data`, and what it would be with the right checksum or spelling."""
    from offload.checkpoint.manifest import canonical, digest
    from offload.sizes import PAGE_BYTES
    from offload.storage import swap_format as slots
    from tests.support.committed import superblock_of

    yield data
    respelled = data
    with contextlib.suppress(ValueError, RecursionError):
        respelled = canonical(json.loads(data))
    if kind in ("manifest", "extra"):
        yield respelled
    elif kind == "commit":
        for line in (data, respelled):
            yield line + digest(line).encode() + b"\n"
    elif kind == "base":
        from tests.attacks.corpus import base_end

        for line in (data, respelled.rstrip(b"\n")):
            for blocks in (0, 1, 2):
                yield base_end(line, bytes(8 * blocks))
    elif kind == "superblock":
        for text in (data, respelled):
            yield superblock_of(text[: PAGE_BYTES - 32])
    else:
        import xxhash

        head = data[: slots._HEADER.size].ljust(slots._HEADER.size, b"\0")
        yield (head + slots._CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def try_one(kind: str, data: bytes) -> None:
    """Raises whatever should not be raised."""
    from offload.errors import OffloadError

    for variant in variants(kind, data):
        with contextlib.suppress(OffloadError):
            CHECKS[kind](variant)


def _manifest(data: bytes) -> None:
    from offload.checkpoint.commit import agree
    from offload.checkpoint.manifest import committed_slots, parse, serialise

    manifest = parse(data)
    assert serialise(manifest) == data
    slots = committed_slots(manifest)
    assert len(slots) == len(manifest.slots)
    for path in range(min(manifest.paths, 4)):
        manifest.slot_map.describe(manifest.slots_in(path))
    if manifest.world == 1:
        agree([manifest], "manifest")


def _commit(data: bytes) -> None:
    from offload.checkpoint.commit import manifest_name, parse_commit

    commit = parse_commit(data)
    assert commit.manifests
    assert "/" not in manifest_name(commit, 0)


def _superblock(data: bytes) -> None:
    from offload.storage.swap_format import parse_superblock

    block = parse_superblock(data, "swap")
    assert 0 <= block.stripe[0] < block.stripe[1]


def _header(data: bytes) -> None:
    from offload.storage.swap_format import parse_header

    header = parse_header(data, "swap", 0, 3)
    assert header.numel >= 0


def _extra(data: bytes) -> None:
    import msgspec

    from offload.checkpoint import extra
    from offload.errors import CorruptionError

    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        raise CorruptionError("no JSON", file="manifest") from None
    extra.encode(extra.decode(value, {}, "manifest"))


def _base(data: bytes) -> None:
    from offload.storage.kept_base import parse_end
    from tests.attacks.corpus import BASE_START

    end = parse_end(data, BASE_START, "base")
    assert end.contents.end == BASE_START
    assert len(end.sums) == end.contents.blocks
    assert end.digests.keys() == end.contents.tensors.keys()


CHECKS: dict[str, Callable[[bytes], None]] = {
    "manifest": _manifest,
    "commit": _commit,
    "superblock": _superblock,
    "header": _header,
    "extra": _extra,
    "base": _base,
}


def seeds(kind: str) -> list[bytes]:
    """Valid documents, and attacks that somebody thought of."""
    from offload.checkpoint import extra
    from offload.checkpoint.manifest import canonical, serialise
    from tests.attacks import corpus
    from tests.support.committed import RUN, manifest_of

    if kind == "manifest":
        attacks = [data for _, data, _ in corpus.manifests() if len(data) <= MOST_BYTES]
        return [
            serialise(manifest_of()),
            serialise(manifest_of(1, 3)),
            corpus.VALID_MANIFEST,
            corpus.VALID_RULES,
            *attacks,
        ]
    if kind == "commit":
        fields = {"schema": "offload commit", "version": 1, "run_id": RUN, "step": 7, "replaces": "a" * 32}
        return [canonical(fields | {"manifests": [[5, "0" * 32]] * 3})]  # type: ignore[arg-type]
    if kind == "superblock":
        return [corpus.VALID_SUPERBLOCK[32:].rstrip(b"\0"), *(data for _, data, _ in corpus.superblocks())]
    if kind == "header":
        return [corpus.VALID_HEADER[:128], *(data[:128] for _, data, _ in corpus.headers())]
    if kind == "base":
        from tests.attacks.corpus import BASE_ROWS

        return [json.dumps({"tensors": rows}, separators=(",", ":")).encode() for rows in (BASE_ROWS, BASE_ROWS[:1])]
    value = {"a": [(1, 2.5, float("nan"))], 3: b"xy", None: 1 << 70, "s": [True, "x", -0.0]}
    return [canonical(extra.encode(value)[0])]


def fuzz(kind: str, arguments: list[str]) -> None:
    """Runs libFuzzer in this process, and ends it."""
    import atheris  # type: ignore[import-not-found,unused-ignore]

    # The loader of an editable install hides the sources from it; they are in the folder this was started in, too.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    with atheris.instrument_imports(include=["offload.checkpoint", "offload.storage"]):
        for data in seeds(kind):
            try_one(kind, data)  # which imports the parsers
    atheris.Setup([sys.argv[0], *arguments], lambda data: try_one(kind, data))
    atheris.Fuzz()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=int, default=300, help="altogether")
    options.add_argument("--kind", choices=KINDS)
    given = options.parse_args()
    kinds = [given.kind] if given.kind else list(KINDS)
    FOUND.mkdir(exist_ok=True)
    failed = False
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            for number, data in enumerate(seeds(kind)):
                (Path(folder) / str(number)).write_bytes(data)
            command = [sys.executable, "-m", "tests.attacks.fuzz", "--child", kind, folder]
            command += [f"-max_total_time={max(given.seconds // len(kinds), 1)}", f"-max_len={MOST_BYTES}"]
            command += [f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={FOUND}/{kind}-"]
            done = subprocess.run(command, capture_output=True, text=True)
        said = done.stderr.splitlines()
        last = next((line for line in reversed(said) if re.match(r"#\d+\s", line)), "nothing ran")
        print(f"{kind}: {'a finding' if done.returncode else 'no finding'}; {last}", flush=True)
        if done.returncode:
            failed = True
            print("\n".join(said[-40:]))
        elif " cov: " not in last:
            failed = True
            print("no line of a parser was counted, so no input could be found to reach new ones")
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        main()
