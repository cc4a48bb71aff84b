"""Hooks of mkdocs: docs/, the measured results and each linked file are on the site, and no link is dead.

    docs/X             -> X
    results/X          -> evidence/X     every page; pictures and data where a page links to them
    another page X.md  -> files/X.md
    source text X      -> files/X.md     a page that shows the file
    other data X       -> files/X        a download

Links between two of them are written in the repository's paths, as GitHub reads them, and rewritten here. A link that
leads to no file, and a link that a reader would see as plain text, end the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODE_OR_LINK = re.compile(
    r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence)[ ]*$"
    r"|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block, a code span, or the target of a Markdown link; what is inside code is not a link."""

ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|#|/")
"""How the target of a link begins that leads to another site, or to a place on the same page."""

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".sh": "bash",
    ".txt": "text",
    ".cfg": "ini",
    ".j2": "jinja",
}
"""By the end of its name: the language in which a page shows a file."""

PICTURES_AND_DATA = (".svg", ".png", ".jpg", ".csv", ".parquet", ".ipynb", ".json")
"""Files of results/ that are copied as they are."""

COMMAND = re.compile(
    r"^(?:kl-comedy|pip|make|python|mlflow|source|cd|export|git|docker|apptainer|apt-get|OMP_NUM_THREADS|\.venv|\(umask)\b",
    re.MULTILINE,
)
"""How a line begins that is typed into a shell."""
SYNOPSIS = re.compile(r"\[(?:--|key=)")
"""A part of a command that may be left out: the line shows a form, and is not typed as it stands."""
YAML_KEY = re.compile(r"[\w.]+:(?:\s|$)")
INDENT = "    "
"""Of a code block without fences."""

TABLE = re.compile(r"<table>(?P<head>.*?)<tbody>(?P<body>.*?)</tbody>\s*</table>", re.DOTALL)
HEADING = re.compile(r"^##+ ", re.MULTILINE)
HEAD_CELL = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td(?P<attributes>[^>]*)>(?P<content>.*?)</td>", re.DOTALL)

WORDY_CELL = 18
"""Characters of a table's mean cell from which a phone shows one line per cell; below it columns are compared."""

DATA = re.compile(r"<!-- json: (?P<id>[\w-]+) (?P<path>[\w./-]+) -->")
"""Where a page wants the text of a JSON file."""

CODE_OR_LINK_ON_A_PAGE = re.compile(r"<(pre|code|script|style|a)\b.*?</\1>", re.DOTALL)
"""What a reader sees as code, or as a link."""
TAG = re.compile(r"<[^>]+>")
DEAD_TEXT = re.compile(
    r"\]\([^)\s]*\)?"
    r"|\] \([\w./#-]+\.(?:md|py|yaml|svg|csv|parquet)(?:#[\w-]*)?\)"
    r"|\((?:\.\./)*(?:results|docs)/[\w./-]*\)"
    r"|\[[^\]\n]+\]\[[^\]\n]*\]"
)
"""Text outside code that was meant as a link: ``](target)``, ``] (target.md)``, ``(results/...)``, ``[text][name]``."""


class DeadLink(Exception):
    """A link leads to no file, or is shown as text. The message names the page and the link."""


# --- which file is where on the site ------------------------------------------------------------------------------
def site_path(path: str) -> str:
    """The path under the site's docs folder of a file, by its path in the repository.

    >>> site_path("docs/peers.md"), site_path("results/lags/README.md"), site_path("configs/quickstart.yaml")
    ('peers.md', 'evidence/lags/README.md', 'files/configs/quickstart.yaml.md')
    """
    top, _, rest = path.partition("/")
    if top == "docs":
        return rest
    suffix = posixpath.splitext(path)[1]
    if top == "results" and suffix in (".md", *PICTURES_AND_DATA):
        return f"evidence/{rest}"
    if suffix in LANGUAGES or not suffix:
        return f"files/{path}.md"
    return f"files/{path}"


def repository_path(uri: str, files: dict[str, str]) -> str:
    """The path in the repository of a page, by its path on the site."""
    return files.get(uri, f"docs/{uri}")


def linked_path(page: str, target: str) -> str | None:
    """The repository's path that a link leads to; None for a link to another site or on the same page.

    >>> linked_path("docs/peers.md", "../results/README.md#c1")
    'results/README.md'
    """
    if ELSEWHERE.match(target):
        return None
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def targets_of(markdown: str) -> list[str]:
    """The targets of the links of a page, those in code left out."""
    return [match["target"] for match in CODE_OR_LINK.finditer(markdown) if match["target"]]


def existing_file(root: Path, page: str, target: str) -> str | None:
    """:func:`linked_path`. Raises :class:`DeadLink` if no such file is in the repository."""
    path = linked_path(page, target)
    if path is None:
        return None
    # A path that leaves the repository may exist on this machine and nowhere else.
    if path.startswith("../") or not (root / path).is_file():
        raise DeadLink(f"{page}: the link to {target!r} leads to no file of the repository")
    return path


def files_outside_docs(root: Path) -> dict[str, str]:
    """What the site shows beside docs/: each file's path on the site, and its path in the repository.

    Raises :class:`DeadLink` for a link that leads nowhere, on any page of the site.
    """
    pages = sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md"))
    pages += sorted(path.relative_to(root).as_posix() for path in (root / "results").rglob("*.md"))
    outside = {path for path in pages if not path.startswith("docs/")}
    # A page that is found by a link has links of its own: the list grows while it is read.
    for page in pages:
        for target in targets_of((root / page).read_text("utf-8")):
            path = existing_file(root, page, target)
            if path is None or path.startswith("docs/") or path in outside:
                continue
            outside.add(path)
            if path.endswith(".md"):
                pages.append(path)
    return {site_path(path): path for path in sorted(outside)}


# --- what stands on the pages -------------------------------------------------------------------------------------
def page_of_source(root: Path, path: str) -> str:
    """A page that shows a file of the repository."""
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    text = (root / path).read_text("utf-8").rstrip("\n")
    # More ticks than any file has in a row: docstrings hold fenced blocks of their own.
    fence = "``````"
    return f"# {posixpath.basename(path)}\n\n`{path}` in the repository.\n\n{fence}{language}\n{text}\n{fence}\n"


def with_site_links(markdown: str, page: str, root: Path) -> str:
    """The text of a page (by its path in the repository), with the links that the site needs.

    Raises :class:`DeadLink` for a link that leads nowhere.
    """
    folder = posixpath.dirname(site_path(page)) or "."

    def rewritten(match: re.Match[str]) -> str:
        target = match["target"]
        if not target:
            return match[0]
        path = existing_file(root, page, target)
        if path is None:
            return match[0]
        _, hash_sign, anchor = target.partition("#")
        relative = posixpath.relpath(site_path(path), folder)
        return f"]({relative}{hash_sign}{anchor}{match['title'] or ''})"

    return CODE_OR_LINK.sub(rewritten, markdown)


def language_of(block: str) -> str:
    """The language of a block of code that states none.

    >>> language_of("kl-comedy list recipes"), language_of("kl: [k1]"), language_of("a -> b")
    ('bash', 'yaml', 'text')
    """
    if block.startswith(">>> "):
        return "pycon"
    if block.startswith("$ "):
        return "console"
    if SYNOPSIS.search(block):
        return "text"
    if COMMAND.search(block):
        return "bash"
    if YAML_KEY.match(block):
        return "yaml"
    return "text"


def with_fences(markdown: str) -> str:
    """Put every indented block of code between fences that name its language: it is then highlighted.

    A paragraph that continues an item of a list is indented too, and stays.
    """
    result: list[str] = []
    block: list[str] = []
    fence = ""
    in_list = False
    for line in [*markdown.split("\n"), ""]:
        opens_or_closes = re.match(r" *(`{3,}|~{3,})", line)
        if opens_or_closes and not block:
            # Only as long a fence closes a block: one of more ticks may hold shorter ones.
            if not fence:
                fence = opens_or_closes[1]
            elif opens_or_closes[1] == fence:
                fence = ""
            result.append(line)
            continue
        starts_block = not block and not in_list and (not result or not result[-1].strip())
        is_code = not fence and line.startswith(INDENT) and line.strip()
        if is_code and (block or starts_block):
            block.append(line)
            continue
        if block and not line.strip():
            block.append(line)
            continue
        if block:
            result += _fenced(block)
            block = []
        if re.match(r"(?:[-*+]|\d+\.) ", line):
            in_list = True
        elif line.strip() and not line.startswith(" "):
            in_list = False
        result.append(line)
    if block:
        # The last line is the one that the loop adds to end a block.
        return "\n".join(result + _fenced(block[:-1]))
    return "\n".join(result[:-1])


def _fenced(block: list[str]) -> list[str]:
    """The lines of an indented block between fences; the blank lines after it stay after it."""
    lines = [line[len(INDENT) :] for line in block]
    after = []
    while lines and not lines[-1].strip():
        after.append(lines.pop())
    # A line that the block's fence would end early has no place in an indented block of ours.
    return [f"```{language_of(chr(10).join(lines))}", *lines, "```", *after]


def with_labelled_cells(html: str) -> str:
    """Give each cell of a table of sentences its column's head, which a phone shows instead of columns.

    A table of numbers stays as it is: its columns are read down, and it scrolls sideways.
    """
    return TABLE.sub(_labelled, html)


def _labelled(table: re.Match[str]) -> str:
    heads = [TAG.sub("", head).strip() for head in HEAD_CELL.findall(table["head"])]
    lengths = [len(TAG.sub("", cell["content"])) for cell in CELL.finditer(table["body"])]
    if len(heads) < 3 or not lengths or sum(lengths) < WORDY_CELL * len(lengths):
        return table[0]

    def labelled_row(row: re.Match[str]) -> str:
        remaining = iter(heads)

        def labelled_cell(cell: re.Match[str]) -> str:
            label = next(remaining, "").replace('"', "&quot;")
            return f'<td{cell["attributes"]} data-label="{label}">{cell["content"]}</td>'

        return CELL.sub(labelled_cell, row[0])

    body = ROW.sub(labelled_row, table["body"])
    return f"<table data-sentences>{table['head']}<tbody>{body}</tbody>\n</table>"


def with_data(html: str, root: Path) -> str:
    """Put the JSON files that a page names (``<!-- json: ID PATH -->``) into it, for its script to read.

    In the page and not beside it: a script may not read a file of a folder that no server serves.
    """

    def element(marker: re.Match[str]) -> str:
        # As the browser reads it, "</" could end the element; in JSON the backslash changes nothing.
        text = (root / marker["path"]).read_text("utf-8").strip().replace("</", "<\\/")
        return f'<script type="application/json" id="{marker["id"]}">{text}</script>'

    return DATA.sub(element, html)


def dead_texts(html: str) -> Iterator[str]:
    """What a reader would see of links that Markdown did not take for links."""
    text = TAG.sub("", CODE_OR_LINK_ON_A_PAGE.sub("code", html))
    for match in DEAD_TEXT.finditer(text):
        yield match[0]


# --- the glossary -------------------------------------------------------------------------------------------------
GLOSSARY = "glossary.md"
WITH_GLOSSARY = (
    "index.md",
    "decision.md",
    "loss_or_reward.md",
    "peers.md",
    "register.md",
    "conformance.md",
    "offpolicy.md",
    "audit.md",
    "results.md",
    "in_your_own_trainer.md",
)
"""The pages whose first use of a word is a link to it."""
NOT_PROSE = re.compile(
    r"^```.*?^```$|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#.*?$|<!--.*?-->|<[^>]*>|^ {4}.*?$|^\|[^\n]*\n\| ?-{3}",
    re.DOTALL | re.MULTILINE,
)
"""Code, links, headings, HTML, and the heads of tables."""


def glossary_words(text: str) -> dict[str, str]:
    """The anchor of every word of the glossary; a heading may have several, with commas between them.

    >>> glossary_words("# G\\n\\n### Lag\\nx\\n\\n### To go, later\\n")
    {'lag': 'lag', 'to go': 'to-go-later', 'later': 'to-go-later'}
    """
    words = {}
    for heading in re.findall(r"^### (.+)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for word in heading.lower().split(", "):
            words[word] = anchor
    return words


def with_glossary_links(markdown: str, words: dict[str, str], to_glossary: str) -> str:
    """``markdown`` with a link at the first use of each word in its prose.

    >>> with_glossary_links("# Lag\\n`lag` is lag. Lag.", {"lag": "lag"}, "glossary.md")
    '# Lag\\n`lag` is [lag](glossary.md#lag). Lag.'
    """
    # The longest first: "to go" is part of no other, and "stale samples" of none that is shorter.
    longest_first = sorted(words, key=len, reverse=True)
    word_pattern = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, longest_first))})(?![\w/-])", re.IGNORECASE)
    linked = set[str]()

    def link(match: re.Match[str]) -> str:
        anchor = words[match[1].lower()]
        if anchor in linked:
            return match[0]
        linked.add(anchor)
        return f"[{match[0]}]({to_glossary}#{anchor})"

    pieces = []
    end = 0
    for other in NOT_PROSE.finditer(markdown):
        pieces += [word_pattern.sub(link, markdown[end : other.start()]), other[0]]
        end = other.end()
    return "".join([*pieces, word_pattern.sub(link, markdown[end:])])


# --- called by mkdocs ---------------------------------------------------------------------------------------------
_FILES: dict[str, str] = {}
"""Of the site that is being built: :func:`files_outside_docs`. mkdocs calls its hooks without a place to keep it."""


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent


def _ends_build(error: DeadLink) -> Exception:
    # Imported here: the tests of the functions above need no mkdocs.
    from mkdocs.exceptions import PluginError

    return PluginError(str(error))


def on_files(files: Any, config: Any, **_: object) -> Any:
    """Add what is outside docs/."""
    from mkdocs.structure.files import File

    root = _root(config)
    _FILES.clear()
    try:
        _FILES.update(files_outside_docs(root))
    except DeadLink as error:
        raise _ends_build(error) from None
    for uri, path in _FILES.items():
        if uri.endswith(".md") and not path.endswith(".md"):
            files.append(File.generated(config, uri, content=page_of_source(root, path)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Rewrite the links of a page, and name the languages of its code."""
    uri = page.file.src_uri
    path = repository_path(uri, _FILES)
    if not HEADING.search(markdown):
        # Without headings the column for a table of contents is empty: the page's tables get its width.
        page.meta["hide"] = ["toc"]
    # A file that is shown as code has no links.
    if not path.endswith(".md"):
        return markdown
    try:
        text = with_site_links(markdown, path, _root(config))
        glossary = _root(config) / "docs" / GLOSSARY
        if uri in WITH_GLOSSARY and glossary.is_file():
            text = with_glossary_links(text, glossary_words(glossary.read_text("utf-8")), GLOSSARY)
        return with_fences(text)
    except DeadLink as error:
        raise _ends_build(error) from None


def on_page_content(html: str, page: Any, config: Any, **_: object) -> str:
    """Refuse a page on which a link is plain text, prepare tables of sentences for a phone, and put in data."""
    dead = list(dead_texts(html))
    if dead:
        raise _ends_build(DeadLink(f"{page.file.src_uri}: a link is shown as text: {dead[0]!r}"))
    return with_data(with_labelled_cells(html), _root(config))
