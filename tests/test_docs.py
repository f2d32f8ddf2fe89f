"""Documents keep their word: every script runs as it stands, links lead somewhere, paths in them exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import offload
from offload import OffloadZero, Tuning, errors
from tests.support.scripts import run_script
from tests.test_rooms import FLOORS, sources

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
RESULTS = sorted((ROOT / "bench" / "results").glob("*.md"))
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields")
NAMED = ("Args", "Raises", "Attributes")
"""Sections of which each line begins with a name."""
BLOCKS = re.compile(r"^(<!-- compiled only: [^\n]*-->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def scripts(document: Path, *, run: bool) -> Iterator[tuple[str, str]]:
    """The Python of a page, as a reader copies it, by document and line.

    A block that begins with an import begins a script, and those below go on from it. Args: run: False: those that are
    marked as compiled only, each by itself.
    """
    page = document.read_text()
    script: list[str] = []
    name = ""
    for block in BLOCKS.finditer(page):
        line = f"{document.stem}-line-{page[: block.start()].count(chr(10)) + 1}"
        if block[1]:
            if not run:
                yield line, block[2]
            continue
        if re.match("import |from ", block[2]):
            if script and run:
                yield name, "".join(script)
            script, name = [], line
        script.append(block[2])
    if script and run:
        yield name, "".join(script)


def cases(*, run: bool) -> list[Any]:
    return [pytest.param(code, id=name) for document in DOCUMENTS for name, code in scripts(document, run=run)]


@pytest.mark.parametrize("code", cases(run=True))
def test_script_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    for _ in range(1 + ('resume="auto"' in code)):  # the second run goes on from what the first one committed
        done = run_script(code, tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", cases(run=False))
def test_script_that_needs_more_than_an_install_compiles(code: str) -> None:
    compile(code, "script", "exec")


def test_first_script_is_the_same_in_readme_and_quick_start_and_its_second_run_asks_for_resume(tmp_path: Path) -> None:
    """As both pages say."""
    (_, code), *_ = scripts(ROOT / "README.md", run=True)
    assert code in (ROOT / "docs" / "quick-start.md").read_text()
    assert run_script(code, tmp_path).returncode == 0
    refused = run_script(code, tmp_path).stderr
    assert "ResumeError" in refused
    assert "resume=True" in refused
    assert run_script(code.replace('run1"', 'run1", resume=True'), tmp_path).returncode == 0


def test_what_readme_attaches_its_script_can_attach(tmp_path: Path) -> None:
    (_, code), *_ = scripts(ROOT / "README.md", run=True)
    (call,) = re.findall(r"`(optimizer\.attach\([^`]*\))`", (ROOT / "README.md").read_text())
    begins = "for x, y in loader:\n"
    assert begins in code
    attached = f"scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)\n{call}\n{begins}"
    done = run_script(code.replace(begins, attached), tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_option_is_named() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    parameters = inspect.signature(OffloadZero.__init__).parameters.values()
    options = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert options | {field.name for field in fields(Tuning)} <= named


def test_every_error_is_named_once_as_in_its_module() -> None:
    page = (ROOT / "docs" / "errors.md").read_text().split("\n## ")[0]
    kinds = [
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__
    ]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == kinds[1:]


def test_every_public_name_is_in_the_reference() -> None:
    """`entries` is for parts of this library."""
    page = (ROOT / "docs" / "reference.md").read_text()
    named = re.findall(r"^::: offload\.([\w.]+)$", page, re.MULTILINE)
    members = {f"OffloadZero.{name}" for name in vars(OffloadZero) if not name.startswith("_") and name != "entries"}
    frameworks = {name for name in named if name.startswith("integrations.")}
    assert sorted(named) == sorted(members | set(offload.__all__) | frameworks)
    assert {name.split(".")[1] for name in frameworks} == {"transformers", "accelerate", "lightning", "quantised"}


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS, *RECIPES], ids=lambda path: path.stem)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_has_a_link_in_the_text_of_another_page() -> None:
    """Scripts among the examples are pages of the site, too."""
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in [*DOCUMENTS, *RESULTS, *RECIPES]
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if (page.parent / target.partition("#")[0]).resolve() not in (page, page.parent)
    }
    pages = {*DOCUMENTS, *RESULTS, *RECIPES, *EXAMPLES} - {ROOT / "README.md"}
    assert not sorted(str(page.relative_to(ROOT)) for page in pages - linked)


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """What `make docs` adds to the pages."""
    spec = spec_from_file_location("site_hook", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_page_with_its_docstring_as_text_and_its_code_as_it_is(script: Path, site: ModuleType) -> None:
    heading, *_ = page = site.example_page(script).splitlines()
    source = script.read_text()
    assert source.startswith(f'"""{heading.removeprefix("# ")}')
    code = page[page.index("```python") + 1 : page.index("```")]
    assert "\n".join(code) == source.split('"""', 2)[2].strip("\n")
    text = ast.get_docstring(ast.parse(source))
    assert text is not None
    assert text in "\n".join(page[: page.index("```python")])


def test_links_to_examples_lead_to_their_pages_on_the_site(site: ModuleType) -> None:
    assert site.fit_links("[it](docs/examples/torchrun.py)", "index.md") == "[it](examples/torchrun.md)"
    assert site.fit_links("[it](examples/torchrun.py)", "commits.md") == "[it](examples/torchrun.md)"
    assert site.fit_links("[step](step.md)", "bench/results/hiding.md") == "[step](../../bench/results/step.md)"
    assert site.fit_links("[code](../offload/errors.py), [tests](../tests)", "errors.md") == "code, tests"


def test_code_in_tables_is_broken_between_words_only_and_pictures_open(site: ModuleType) -> None:
    word = "<span class=word>{}</span>".format
    cell = f"<td>see <code>{word('plan')} {word('--param-tier')}</code></td>"
    assert site.fit_html("<td>see <code>plan --param-tier</code></td>") == cell
    assert site.fit_html("<p><code>plan --param-tier</code></p>") == "<p><code>plan --param-tier</code></p>"
    picture = '<img alt="steps" src="../step.png" />'
    assert site.fit_html(picture) == f'<a class="picture" href="../step.png">{picture}</a>'


def anchors(document: Path) -> set[str]:
    """The names that its headings have in links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS, *RECIPES], ids=lambda path: path.stem)
def test_lists_begin_after_an_empty_line(document: Path) -> None:
    """The site's parser takes them for lines of the paragraph above otherwise, as the repository's does not."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?!- |\d+\. |\s).+\n(?:- |\d+\. ).*", text, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_are_named_exist(document: Path) -> None:
    """`offload/...`, `tests/...` and the like, in backquotes."""
    named = re.findall(r"`((?:offload|tests|bench|docs|kernels)/[\w./]+)`", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def stations() -> Iterator[tuple[str, str]]:
    """The files and functions in the rows of one-step.md. A row without a file is of the file above it."""
    above: list[str] = []
    for line in (ROOT / "docs" / "one-step.md").read_text().splitlines():
        cells = [re.findall(r"`([\w./]+)`", cell) for cell in line.split("|")[1:3]]
        if line.startswith("|") and cells[1]:
            above = cells[0] or above
            assert len(above) in (1, len(cells[1])), line
            yield from zip(above * (len(cells[1]) // len(above)), cells[1], strict=True)


def test_stations_of_a_step_exist() -> None:
    """Each row of one-step.md names a file and a function that is in it."""
    assert len([*stations()]) > 40
    assert not [f"{file}: {function}" for file, function in stations() if function not in functions(ROOT / file)]


def test_stations_of_a_step_are_called() -> None:
    """By the library, or by whoever it hands them to."""
    used: set[str] = set()
    for file in (ROOT / "offload").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        used |= {one.attr for one in nodes if isinstance(one, ast.Attribute)}
        used |= {one.func.id for one in nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    assert not [function for _, function in stations() if function.rpartition(".")[2] not in used]


def test_functions_that_texts_name_exist() -> None:
    """`Class.method` of a class of the library, on the pages for those who work on it."""
    classes = {
        node.name: {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)} | members(node)
        for file in (ROOT / "offload").rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    pages = [ROOT / "docs" / f"{name}.md" for name in ("one-step", "development", "simulated-device", "swap-files")]
    named = {found for page in pages for found in re.findall(r"`([A-Z]\w+)\.(\w+)", page.read_text())}
    assert len(named) > 50
    assert not [f"{one}.{name}" for one, name in sorted(named) if one in classes and name not in classes[one]]


def test_what_is_to_be_changed_is_in_the_file_that_the_page_names() -> None:
    """The rows of "Where to change what": names in parentheses are in one of the files beside them."""
    page = (ROOT / "docs" / "development.md").read_text().split("## Where to change what")[1].split("\n## ")[0]
    wrong, looked_for = [], 0
    for line in page.splitlines():
        what, where = line.strip("|").split("|", 1) if line.count("|") == 3 else ("", "")
        files = [ROOT / file for file in re.findall(r"`(offload/[\w/]+\.py)`", where)]
        words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
        names = {name for group in re.findall(r"\((`[^()]*)\)", what) for name in re.findall(r"`(\w+)`", group)}
        looked_for += len(names) if files else 0
        wrong += [f"{name}: {line}" for name in names - words if files]
    assert looked_for > 40
    assert not wrong


def test_nothing_tells_to_install_this_library_from_an_index() -> None:
    """It is on none: what has its name there is somebody else's."""
    told = [
        f"{file.name}: {line.strip()}"
        for file in [*DOCUMENTS, *RECIPES, *RESULTS, *(ROOT / "offload").rglob("*.py")]
        for line in file.read_text().splitlines()
        if re.search(r"pip install (?:-\S+ )*['\"]?offload\b", line)
    ]
    assert not told


def test_the_table_of_rooms_is_in_the_order_of_imports() -> None:
    page = (ROOT / "docs" / "development.md").read_text().split("## Rooms")[1].split("## Words")[0]
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    rooms = {room for room, _ in sources()}
    assert named == [*(room for floor in reversed(FLOORS) for room in reversed(floor) if room in rooms), "kernels"]


def members(node: ast.ClassDef) -> set[str]:
    """What a class defines: methods, attributes and values."""
    found: set[str] = set()
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found.add(one.target.id)
        elif isinstance(one, ast.Assign):
            found |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    return found


def functions(file: Path) -> set[str]:
    """The functions and methods that a file defines, methods with their class."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_figures_are_of_a_script_that_exists_or_the_page_says_that_it_is_gone(page: Path) -> None:
    text = page.read_text()
    scripts = set(re.findall(r"`python (bench/\w+\.py)", text))
    gone = {script for script in scripts if not (ROOT / script).exists()}
    assert scripts
    assert gone <= set(re.findall(r"(bench/\w+\.py)[^`]*` is gone since", text))


def docstrings(file: Path) -> Iterator[tuple[str, str, set[str]]]:
    """The docstrings of a file: where each is, its text, and the arguments that it may describe."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                where = f"{getattr(node, 'name', 'the file')}, line {node.body[0].lineno}"
                yield where, text, arguments(node)


def arguments(node: ast.AST) -> set[str]:
    """The arguments of a function, or of a class: those of its constructor, and its attributes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        each = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        several = {"*": node.args.vararg, "**": node.args.kwarg}
        return {one.arg for one in each} | {stars + one.arg for stars, one in several.items() if one is not None}
    names: set[str] = set()
    for one in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            names.add(one.target.id)
        elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
            names |= arguments(one)
    return names


def faults(text: str, names: set[str]) -> Iterator[str]:
    """What the site's parser does not understand in a docstring, or a reader of it misses."""
    heads = "|".join(SECTIONS)
    first, *parts = re.split(rf"^({heads}):$", text, flags=re.MULTILINE)
    if not first.strip() or re.match(rf"(?:{heads}):|TODO", first):
        yield "it has no first line that says what it is about"
    elif parts and not first.endswith("\n\n"):
        yield "there is no empty line before its first section"
    for found in re.findall(rf"\b(?:{heads}|Attribute): .*", text):
        yield f"a section is not on lines of its own: {found}"
    for name in sorted(names):
        if re.search(rf"(?<![\w`*]){re.escape(name)}(?:, \w+)*: ", first):
            yield f"{name} is described outside of a section"
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        section = re.match(r"(?:\n {4}.*|\n(?=\n {4}))*", body)
        lines = [] if section is None else re.findall(r"^ {4}(\S.*)", section[0], re.MULTILINE)
        if not lines:
            yield f"{head} has no indented lines"
        for line in lines if head in NAMED else ():
            name, colon, _ = line.partition(": ")
            if not colon or (head == "Args" and name not in names):
                yield f"{head} has no {name!r}"


@pytest.mark.parametrize("file", [file for _, file in sources()], ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_have_a_first_line_and_sections_on_lines_of_their_own(file: Path) -> None:
    assert not [f"{where}: {fault}" for where, text, names in docstrings(file) for fault in faults(text, names)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Raises: ValueError if it is wrong.", "it has no first line"),
        ("TODO.\n\nArgs:\n    size: in bytes.", "it has no first line"),
        ("Reads. Args: size: in bytes.", "a section is not on lines of its own"),
        ("Reads.\n\nAttribute: size: in bytes.", "a section is not on lines of its own"),
        ("Reads. size: in bytes.", "size is described outside of a section"),
        ("Reads.\nArgs:\n    size: in bytes.", "there is no empty line"),
        ("Reads.\n\nArgs:\nsize: in bytes.", "Args has no indented lines"),
        ("Reads.\n\nArgs:\n    sizes: in bytes.", "Args has no 'sizes'"),
        ("Reads.\n\nRaises:\n    ValueError if it is wrong.", "Raises has no 'ValueError if it is wrong.'"),
    ],
)
def test_a_docstring_out_of_form_is_found(text: str, fault: str) -> None:
    assert any(one.startswith(fault) for one in faults(text, {"size"}))
    assert not list(faults("Reads.\n\nArgs:\n    size: in\n        bytes.\n\nRaises:\n    E: so.", {"size"}))


def test_every_page_is_in_the_sites_menu() -> None:
    """The site is built strictly: a page that is in no menu stops it."""
    menu = re.findall(r"(?m)^ +- (?:.+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1])
    shown = {path for name in menu for path in (*(ROOT / "docs").glob(name), *ROOT.glob(name))}
    pages = {*(ROOT / "docs").glob("*.md"), *RECIPES, *(ROOT / "bench" / "results").rglob("*.md")}
    assert {str(page.relative_to(ROOT)) for page in pages - shown} == set()
