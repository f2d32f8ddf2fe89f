"""What `make docs` adds to the pages of docs/: README as the first one, the changelog, and the results of benchmarks.

Links between them are those of the repository, so that they work there, too. Here they are made to fit the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = {"index.md": ROOT / "README.md", "CHANGELOG.md": ROOT / "CHANGELOG.md"}
SHOWN = (".md", ".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside of docs/."""
    results = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "bench" / "results").rglob("*.*"))}
    for uri, path in {**OUTSIDE, **results}.items():
        if path.suffix in SHOWN:
            files.append(File.generated(config, uri, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them."""

    def fitted(found: re.Match[str]) -> str:
        text, target = found[2], found[3]
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        real = (home / path).resolve()
        if real.suffix not in SHOWN:
            return text  # a file of the repository, or a folder
        uri = "index.md" if real == ROOT / "README.md" else real.relative_to(ROOT).as_posix().removeprefix("docs/")
        return f"{found[1]}[{text}]({up}{uri}{mark}{anchor})"

    source = page.file.src_uri
    home = ROOT if source in OUTSIDE else (ROOT / source).parent if source.startswith("bench/") else ROOT / "docs"
    up = "../" * source.count("/")
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", fitted, markdown)
