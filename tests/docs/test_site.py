"""The hooks and the extension of the site, on planted pages; without mkdocs, except in the slow tests."""

import html
import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from built_site import IS_INSTALLED, WITHOUT, build, whole_site

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "research" / "scripts"))
import api_pages  # noqa: E402
import mkdocs_hooks as hooks  # noqa: E402

needs_mkdocs = pytest.mark.skipif(not IS_INSTALLED, reason=WITHOUT)


@pytest.fixture
def repository(tmp_path):
    """Two pages that link to each other and to other files, as docs/ and results/ do."""
    files = {
        "docs/index.md": "# Start\n\n[study](../results/study/README.md#two), [config](../configs/a.yaml)\n",
        "docs/guides/more.md": "# More\n\n![figure](../../results/study/figure.svg) [start](../index.md)\n",
        "results/study/README.md": "# Study\n\n## Two\n\n[back](../../docs/guides/more.md) [rows](rows.csv)\n",
        "results/study/figure.svg": "<svg/>",
        "results/study/rows.csv": "a,b\n",
        "results/study/unused.parquet": "never linked",
        "configs/a.yaml": "name: a\n",
        "CONTRIBUTING.md": "# Contribute\n\n[start](docs/index.md) [script](tool.sh)\n",
        "tool.sh": "echo ```\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write(repository, name, text):
    (repository / name).write_text(text)


# --- which files are on the site ----------------------------------------------------------------------------------
def test_pages_of_results_and_what_is_linked_are_on_the_site(repository):
    assert hooks.files_outside_docs(repository) == {
        "evidence/study/README.md": "results/study/README.md",
        "evidence/study/figure.svg": "results/study/figure.svg",
        "evidence/study/rows.csv": "results/study/rows.csv",
        "files/configs/a.yaml.md": "configs/a.yaml",
    }


def test_a_page_that_is_found_by_a_link_brings_its_own_links(repository):
    write(repository, "docs/index.md", "[contribute](../CONTRIBUTING.md)\n")
    files = hooks.files_outside_docs(repository)
    assert files["files/CONTRIBUTING.md"] == "CONTRIBUTING.md"
    assert files["files/tool.sh.md"] == "tool.sh"


def test_every_link_of_this_repository_leads_to_a_file():
    """Whatever page of docs/ or results/ it is on, and of the pages that they link to."""
    files = hooks.files_outside_docs(ROOT)
    assert "evidence/evidence/README.md" in files


def test_the_first_use_of_a_word_leads_to_its_entry_in_the_glossary():
    glossary = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    words = hooks.glossary_words(glossary)
    assert len(set(words.values())) >= 25
    elsewhere = "# Cosine\n\n`cosine` and [a cosine](x.md)\n\n```text\ncosine\n```\n\n"
    page = f"{elsewhere}A Cosine of one. Cosines, cosine. Fresh samples.\n"
    linked = hooks.with_glossary_links(page, words, "glossary.md")
    assert linked == page.replace("A Cosine", "A [Cosine](glossary.md#cosine)").replace(
        "Fresh samples", "[Fresh samples](glossary.md#on-policy-fresh-samples)"
    )


def test_every_page_with_glossary_links_is_there_and_uses_a_word():
    words = hooks.glossary_words((ROOT / "docs" / "glossary.md").read_text("utf-8"))
    for page in hooks.WITH_GLOSSARY:
        assert "glossary.md#" in hooks.with_glossary_links(
            (ROOT / "docs" / page).read_text("utf-8"), words, "glossary.md"
        )


SENTENCES = """<table>
<thead>
<tr>
<th>your samples</th>
<th style="text-align: right;">you <code>have</code></th>
<th>use</th>
</tr>
</thead>
<tbody>
<tr>
<td>fresh</td>
<td style="text-align: right;">the full logits of both models</td>
<td>the exact KL in the reward</td>
</tr>
</tbody>
</table>"""


def test_cells_of_sentences_name_their_columns():
    """A phone shows the names instead of columns: every cell has its own, and the text and style that it had."""
    page = hooks.with_labelled_cells(SENTENCES)
    assert re.findall(r'data-label="([^"]*)">([^<]*)<', page) == [
        ("your samples", "fresh"),
        ("you have", "the full logits of both models"),
        ("use", "the exact KL in the reward"),
    ]
    assert page.count("text-align: right;") == 2
    assert "<table data-sentences>" in page


@pytest.mark.parametrize("cell", ["0.25", ""])
def test_columns_of_numbers_stay_columns(cell):
    numbers = re.sub(r"(<td[^>]*>)[^<]*<", rf"\g<1>{cell}<", SENTENCES)
    assert hooks.with_labelled_cells(numbers) == numbers


def without_code(match):
    return match[0] if match["target"] else "code"


def test_no_link_of_this_repository_is_plain_text():
    dead = {}
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages += [path for path in hooks.files_outside_docs(ROOT).values() if path.endswith(".md")]
    for page in pages:
        text = hooks.CODE_OR_LINK.sub(without_code, hooks.with_fences((ROOT / page).read_text()))
        # A link's own text may be a path.
        text = re.sub(r"\[[^\[\]]*\]\([^()\s]+\)", "link", text)
        texts = list(hooks.dead_texts(text))
        if texts:
            dead[page] = texts
    assert dead == {}


# --- links --------------------------------------------------------------------------------------------------------
def test_links_lead_to_the_place_on_the_site_and_keep_their_anchors(repository):
    page = (repository / "docs/index.md").read_text()
    text = hooks.with_site_links(page, "docs/index.md", repository)
    assert "[study](evidence/study/README.md#two), [config](files/configs/a.yaml.md)" in text


def test_a_link_keeps_its_title(repository):
    text = hooks.with_site_links('[study](../results/study/README.md "All runs")', "docs/index.md", repository)
    assert text == '[study](evidence/study/README.md "All runs")'


@pytest.mark.parametrize("name", ["export.parquet", "rows.csv", "figure.svg", "shot.png", "results.ipynb", "a.json"])
def test_pictures_and_data_of_results_are_copied_beside_their_page(name):
    assert hooks.site_path(f"results/study/{name}") == f"evidence/study/{name}"


def test_links_of_results_lead_back(repository):
    page = (repository / "results/study/README.md").read_text()
    text = hooks.with_site_links(page, "results/study/README.md", repository)
    assert "[back](../../guides/more.md) [rows](rows.csv)" in text


@pytest.mark.parametrize(
    "text", ["`[a](../no.md)`", "```\n[a](../no.md)\n```", "[a](https://x.org/y)", "[a](#b)", "[a](mailto:a@b.c)"]
)
def test_what_is_no_link_to_a_file_stays(repository, text):
    assert hooks.with_site_links(text, "docs/index.md", repository) == text


@pytest.mark.parametrize("target", ["../results/none.md", "none.md", "../results/study", "../../outside.md", "a.yaml"])
@pytest.mark.parametrize("page", ["docs/index.md", "results/study/README.md"])
def test_a_dead_link_is_an_error_that_names_page_and_link(repository, page, target):
    (repository.parent / "outside.md").write_text("not of this repository")
    write(repository, page, f"[there]({target})\n")
    with pytest.raises(hooks.DeadLink, match=re.escape(f"{page}: the link to {target!r}")):
        hooks.files_outside_docs(repository)


@pytest.mark.parametrize(
    "text",
    [
        "<p>see (results/lags/README.md)</p>",
        "<p>[lags](<em>results/lags/README.md</em>)</p>",
        "<p>[lags] (lags.md)</p>",
        "<p>[lags][lags]</p>",
    ],
)
def test_a_link_that_is_shown_as_text_is_seen(text):
    assert list(hooks.dead_texts(text)) != []


@pytest.mark.parametrize(
    "text",
    [
        '<p><a href="../lags/">lags</a> 0.5 [0.4, 0.6] (<a href="#s9">S9</a>)</p>',
        "<p>in (<code>results/lags/README.md</code>)</p>",
        '<p>in (<a href="../lags/">results/lags</a>)</p>',
        "<pre><code>[a](b.md)</code></pre>",
        "<p>over [0, 1] (20 runs)</p>",
    ],
)
def test_what_is_no_dead_link_is_not_seen(text):
    assert list(hooks.dead_texts(text)) == []


# --- code ---------------------------------------------------------------------------------------------------------
def test_an_indented_block_gets_fences_and_its_language():
    page = "Run:\n\n    kl-comedy list recipes\n\n    make test\n\nThen:\n\n    kl: []\n"
    fenced = "Run:\n\n```bash\nkl-comedy list recipes\n\nmake test\n```\n\nThen:\n\n```yaml\nkl: []\n```\n"
    assert hooks.with_fences(page) == fenced
    assert hooks.with_fences(page.rstrip("\n")) == fenced.rstrip("\n")


@pytest.mark.parametrize(
    "page",
    [
        "- an item\n\n    its second paragraph\n\nA text.",
        "A line\n    that goes on.",
        "```text\n\n    indented\n```\n",
        "``````python\n```\n\n    indented\n```\n\n    more\n``````\n",
        "~~~text\n\n    indented\n~~~\n",
        "12. an item\n\n    its second paragraph\n",
    ],
    ids=["list", "paragraph", "fenced", "fences in fences", "tildes", "numbered list"],
)
def test_what_is_no_indented_block_stays(page):
    assert hooks.with_fences(page) == page


def test_a_block_after_the_end_of_a_list_gets_fences():
    page = "- an item\n\nA text.\n\n    make test\n"
    assert hooks.with_fences(page) == "- an item\n\nA text.\n\n```bash\nmake test\n```\n"


def test_pages_lose_no_line_to_fences():
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "results").rglob("*.md")]:
        text = page.read_text()
        fenced = hooks.with_fences(text)
        assert [line.strip() for line in fenced.split("\n") if "```" not in line] == [
            line.strip() for line in text.split("\n") if "```" not in line
        ], page


@pytest.mark.parametrize(
    ("block", "language"),
    [
        (">>> 1 + 1", "pycon"),
        ("$ kl-comedy status first", "console"),
        ("kl-comedy audit CONFIG [key=value ...]", "text"),
        ("(umask 077; openssl rand -hex 32)\npip install a", "bash"),
        ("loss = a + b", "text"),
    ],
)
def test_the_language_of_a_block(block, language):
    assert hooks.language_of(block) == language


# --- pages of files -----------------------------------------------------------------------------------------------
def test_the_page_of_a_file_shows_it_as_code(repository):
    write(repository, "tool.sh", "echo '```'\n")
    page = hooks.page_of_source(repository, "tool.sh")
    assert "``````bash\necho '```'\n``````\n" in page


# --- docstrings on the pages of the API ---------------------------------------------------------------------------
def test_a_role_becomes_a_link_to_the_name_in_its_scope():
    text = api_pages.with_links(":func:`~kl_comedy.kl.resolve_terms` and :meth:`label`", {"label": "a.b.label"}.get)
    assert text.startswith("`resolve_terms` and ")
    assert '<autoref identifier="a.b.label" optional><code>label</code></autoref>' in text


def test_every_role_of_the_package_is_converted():
    left = []
    for file in (ROOT / "src" / "kl_comedy").rglob("*.py"):
        left += re.findall(r":[a-z]+:`[^`]+`", api_pages.with_links(file.read_text(), lambda name: None))
    assert left == []


def test_each_doctest_of_a_docstring_becomes_a_block_of_its_own():
    text = "First.\n\n>>> 1\n1\n\nSecond.\n\n    >>> 2\n    2\n\n    >>> 3\n    3"
    fenced = api_pages.with_fenced_doctests(text)
    assert fenced == (
        "First.\n\n```pycon\n>>> 1\n1\n```\n\nSecond.\n\n"
        "    ```pycon\n    >>> 2\n    2\n    ```\n\n    ```pycon\n    >>> 3\n    3\n    ```"
    )


def test_the_bounds_of_a_field_are_said_in_words():
    assert api_pages.field_text("A text.", {"minimum": 2}) == "A text. A number at least 2."
    assert api_pages.field_text("A text.", {"above": 0, "maximum": 1}) == "A text. A number above 0 and at most 1."


def test_an_unknown_rule_of_a_field_adds_nothing():
    assert api_pages.field_text("A text.", {"parse": None}) == "A text."


# --- a site ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def small_site(repository):
    shutil.copy(ROOT / "research" / "scripts" / "mkdocs_hooks.py", repository)
    (repository / "mkdocs.yml").write_text("site_name: a\nhooks: [mkdocs_hooks.py]\ntheme: {name: mkdocs}\n")
    return repository


@needs_mkdocs
def test_a_small_site_is_built_with_its_results(small_site, tmp_path):
    done = build(small_site, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    start = (tmp_path / "site" / "index.html").read_text()
    assert 'href="evidence/study/#two"' in start
    assert 'href="files/configs/a.yaml/"' in start
    assert (tmp_path / "site" / "evidence" / "study" / "figure.svg").is_file()
    assert 'href="../../guides/more/"' in (tmp_path / "site" / "evidence" / "study" / "index.html").read_text()


@needs_mkdocs
@pytest.mark.parametrize("dead", ["[lags](../results/lags.md)", "[lags] (lags.md)", "(results/lags.md)"])
def test_a_dead_link_ends_the_build(small_site, tmp_path, dead):
    write(small_site, "docs/index.md", f"# Start\n\nSee {dead}.\n")
    done = build(small_site, tmp_path / "site")
    assert done.returncode != 0
    assert "index.md" in done.stdout + done.stderr
    assert "lags.md" in done.stdout + done.stderr


# --- the site of this repository -------------------------------------------------------------------------------------
@pytest.fixture
def site():
    if not IS_INSTALLED:
        pytest.skip(WITHOUT)
    return whole_site()


def api_html(site):
    return {page: page.read_text() for page in (site / "api").rglob("index.html")}


@pytest.mark.slow
def test_kl_term_shows_every_field_with_its_type_and_meaning(site):
    import dataclasses

    from kl_comedy import KLTerm

    page = (site / "api" / "kl" / "index.html").read_text()
    for field in dataclasses.fields(KLTerm):
        anchor = f'id="kl_comedy.kl.term.KLTerm.{field.name}"'
        assert page.count(anchor) == 1, field.name
        after = page[page.index(anchor) :]
        shown = re.sub(r"<[^>]+>", "", after[: after.index('<div class="doc doc-object', 1)])
        assert f"{field.name}:" in shown, field.name
        meaning = re.sub(r"\W+", " ", api_pages.field_text(field.metadata["doc"], {})).strip()
        assert meaning in re.sub(r"\W+", " ", html.unescape(shown)), field.name


@pytest.mark.slow
def test_no_role_and_no_naked_doctest_is_left(site):
    for page, content in api_html(site).items():
        text = re.sub(r"<pre.*?</pre>", "", content, flags=re.DOTALL)
        assert re.findall(r":(?:func|class|mod|meth|data|attr|exc):", text) == [], page
        assert "&gt;&gt;&gt;" not in text, page
        assert "<blockquote>" not in text, page


def object_at(path):
    """What the dotted path names; None where nothing has that name."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name, None)
        return value
    return None


@pytest.mark.slow
def test_nothing_is_documented_twice(site):
    """A class or function that a package exports has one place on the site, that of its own module."""
    places = {}
    for content in api_html(site).values():
        for path in re.findall(r'<h\d id="(kl_comedy\.[\w.]+)" class="doc', content):
            documented = object_at(path)
            if inspect.isclass(documented) or inspect.isfunction(documented) or inspect.ismodule(documented):
                places.setdefault(id(documented), []).append(path)
    assert len(places) > 100
    assert [paths for paths in places.values() if len(paths) > 1] == []


@pytest.mark.slow
def test_functions_show_their_types(site):
    content = (site / "api" / "index.html").read_text()
    signature = re.sub(r"<[^>]+>", "", content[content.index('id="kl_comedy.api.certify"') :][:6000])
    assert "seed: int = 0" in signature


@pytest.mark.slow
def test_every_page_of_results_is_reached_from_the_menu_or_another_page(site):
    linked = set()
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#]+)"', page.read_text()):
            if "://" not in target:
                linked.add((page.parent / target).resolve())
    lonely = []
    for page in (site / "evidence").rglob("index.html"):
        if page.parent.resolve() not in linked:
            lonely.append(str(page.relative_to(site)))
    assert lonely == []


def test_data_that_a_page_names_stand_in_it(repository):
    """As the browser reads an element, the text of the data cannot end it."""
    (repository / "results" / "rows.json").write_text('["a </script><b>", 1]\n')
    markers = "<!-- json: my-rows results/rows.json -->\n<!-- another comment -->"
    page = hooks.with_data(f"<p>text</p>\n{markers}", repository)
    element = re.search(r'<script type="application/json" id="my-rows">(.*?)</script>', page)
    assert json.loads(element[1]) == ["a </script><b>", 1]
    assert page.endswith("<!-- another comment -->")
