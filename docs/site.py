"""What `make docs` adds to the pages of docs/: README as the first one, the changelog, results of benchmarks, examples.

Links between them are those of the repository, so that they work there, too. Here they are made to fit the site.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
EXAMPLES = ROOT / "docs" / "examples"
RECIPES = ROOT / "docs" / "recipes"
SHOWN = (".md", ".png", ".svg")

BOOST = {"Start": 5, "How-to": 8, "Concepts": 4, "Reference": 2}
"""How much a page counts in the search, by its group: who asks wants to use the library first. Subgroups count 1."""


def outside() -> dict[str, Path]:
    """The files that lie outside of docs/, or are none of its pages, by their place on the site."""
    results = {path.relative_to(ROOT).as_posix(): path for path in sorted(RESULTS.rglob("*.*")) if path.suffix in SHOWN}
    examples = {f"examples/{path.stem}.md": path for path in sorted(EXAMPLES.glob("*.py"))}
    return {"index.md": ROOT / "README.md", "CHANGELOG.md": ROOT / "CHANGELOG.md", **results, **examples}


def example_page(script: Path) -> str:
    """A script as a page: its docstring as text, titled by the docstring's beginning, and the code below."""
    source = script.read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    (statement, *_) = ast.parse(source).body
    code = "\n".join(source.splitlines()[statement.end_lineno :]).strip("\n")
    title = re.split(r"[:.\n]", docstring)[0]
    return f"# {title}\n\n{docstring}\n\n`{script.relative_to(ROOT)}`:\n\n```python\n{code}\n```\n"


def with_script(markdown: str, source: str) -> str:
    """The page of a recipe with its script below; any other page as it is.

    Args:
        markdown: the page.
        source: its place on the site.
    """
    script = RECIPES / f"{Path(source).stem}.py"
    if Path(source).parent.name != RECIPES.name or not script.exists():
        return markdown
    return f"{markdown}\n## The script\n\n```python\n{script.read_text().strip()}\n```\n"


def fit_links(markdown: str, source: str) -> str:
    """The links of a page as the site has them.

    Args:
        markdown: the page.
        source: its place on the site, such as "bench/results/step.md".

    Returns: the page, with links that lead to other pages of the site. Links to other files of the repository are text.
    """
    places = {path: uri for uri, path in outside().items()}
    real = outside().get(source, ROOT / "docs" / source)
    up = "../" * source.count("/")

    def fitted(found: re.Match[str]) -> str:
        text, target = found[2], found[3]
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        file = (real.parent / path).resolve()
        if file not in places and file.suffix not in SHOWN:
            return text  # a file of the repository, or a folder
        uri = places.get(file) or file.relative_to(ROOT).as_posix().removeprefix("docs/")
        return f"{found[1]}[{text}]({up}{uri}{mark}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", fitted, markdown)


def fit_html(html: str) -> str:
    """Pictures that open at their full size, and code in tables that is broken between words only."""

    def words(code: re.Match[str]) -> str:
        return f"<code>{' '.join(f'<span class=word>{word}</span>' for word in code[1].split(' '))}</code>"

    def cell(found: re.Match[str]) -> str:
        return re.sub(r"<code>([^<]*)</code>", words, found[0])

    html = re.sub(r'<img [^>]*?src="([^"]*)"[^>]*>', r'<a class="picture" href="\1">\g<0></a>', html)
    return re.sub(r"<t([dh])\b.*?</t\1>", cell, html, flags=re.DOTALL)


def on_config(config: Any) -> Any:
    """The pages that a pattern in the navigation stands for, such as "bench/results/*.md"."""

    def filled(items: list[Any]) -> list[Any]:
        found: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                found += [{title: filled(below) if isinstance(below, list) else below} for title, below in item.items()]
            elif "*" in item:
                found += [uri for uri in outside() if Path(uri).match(item) and not uri.endswith("README.md")]
            else:
                found.append(item)
        return found

    config.nav = filled(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that lie outside of docs/, and those of the examples."""
    from mkdocs.structure.files import File  # the tests have no mkdocs

    for uri, path in outside().items():
        content = example_page(path) if path.suffix == ".py" else path.read_bytes()
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them, the script of a recipe, and how much the page counts in the search."""
    groups = [section.title for section in page.ancestors]
    page.meta["search"] = {"boost": BOOST[groups[0]] if len(groups) == 1 else 1}
    return with_script(fit_links(markdown, page.file.src_uri), page.file.src_uri)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Pictures and tables as the site has them, and links for the pages that docstrings name."""
    if page.file.src_uri == "reference.md":
        html = re.sub(r"\bdocs/([\w-]+)\.md", r'<a href="../\1/">\g<0></a>', html)
    return fit_html(html)
