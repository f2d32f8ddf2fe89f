"""`offload bench adam` at a tiny size: every contestant runs, and one that cannot is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from offload import native
from offload.cli import bench_adam, bench_adam_peers
from offload.errors import ConfigError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("no C++ compiler\nand a long story")

    monkeypatch.setattr(bench_adam_peers, "_torch_compile", no_compiler)
    monkeypatch.setattr(bench_adam, "_SAMPLE", 2000)


def test_json_lists_every_contestant_with_the_agreed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_adam.adam(n="1000,1e3", threads="1", rounds=2, as_json=True, out=tmp_path / "charts")
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    keys = {"contestant", "job", "n", "threads", "ns_per_param", "gb_per_s", "x_limit"}
    assert all(set(row) == keys for row in rows)
    ours = {f"offload {variant}" for variant in native.available_variants()}
    for job in ("fp32", "mixed"):
        assert ours | {"torch fused"} <= {row["contestant"] for row in rows if row["job"] == job}
    assert all(row["n"] == 1000 and row["threads"] == 1 for row in rows)
    assert all(math.isclose(row["gb_per_s"], 28 / row["ns_per_param"]) for row in rows)
    limits = [row for row in rows if row["contestant"] == "limit"]
    assert all(row["x_limit"] == 1.0 for row in limits)
    assert "torch.compile: RuntimeError: no C++ compiler" in " ".join(shown.err.split())
    assert (tmp_path / "charts" / "adam.png").read_bytes().startswith(b"\x89PNG")


def test_table_and_markdown_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_model", lambda: ("A CPU", ("avx2",)))
    results, skipped = bench_adam.measure([500], [1], rounds=1)
    assert "A CPU (avx2)" in str(bench_adam.table(results).caption)
    text = bench_adam.markdown(results, skipped)
    assert "A CPU (avx2)" in text
    assert "Left out: torch.compile: RuntimeError: no C++ compiler." in text


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "1e6,"])
def test_wrong_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--n="):
        bench_adam.sizes(text)


def test_all_threads_are_the_usable_ones_and_none_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable_cpus", lambda: 4)
    assert bench_adam.thread_counts("1,all,4") == [1, 4]
