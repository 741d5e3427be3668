"""Checks the built documentation site: `python -m scripts.docs_site.check build/site`. Prints every problem; 1 if any.

* No page or style loads anything from another host.
* Every configuration key and every public name has its place.
* A Markdown file has as many headings, lists, table rows, code blocks and pictures on the site as on GitHub: MkDocs
  reads another dialect of Markdown, where for example a list needs an empty line before it.
* Where Chromium is installed: the search of a page that is opened as a file finds a page.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from run_kit.config.schema import Key, entries
from scripts.docs_site import pages
from scripts.markdown_links import tokens

# Attributes whose address a browser loads by itself, by element. A <link> counts unless it only names a page.
_LOADING = {
    **dict.fromkeys(("audio", "embed", "iframe", "input", "script", "track"), ("src",)),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "object": ("data",),
    "link": ("href",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
_NAMING = {"canonical", "next", "prev", "alternate", "license", "author"}
_FOREIGN = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "tr", "td", "pre", "blockquote", "img")


class _Page(HTMLParser):
    """Addresses that a page loads, its ids, and how often each counted element is in its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._in_article = False
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        self._in_style = tag == "style"
        self.loaded += _addresses_in_style(values.get("style", ""))
        if tag != "link" or not set(values.get("rel", "").split()) & _NAMING:
            self.loaded += [values[name] for name in _LOADING.get(tag, ()) if name in values]
        if tag == "article":
            self._in_article = True
        elif self._in_article and tag in _COUNTED:
            self.counts[tag] += 1

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += _addresses_in_style(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
        if tag == "article":
            self._in_article = False


def foreign_loads(text: str, *, suffix: str = ".html") -> list[str]:
    """Addresses on other hosts that a browser loads with this page or style."""
    loaded = _Page(text).loaded if suffix == ".html" else _addresses_in_style(text)
    return [address for address in loaded if _FOREIGN.match(address)]


def differences_from_github(markdown: str, page: str) -> list[str]:
    """Differences in number between the elements of a page and those that GitHub makes of its Markdown."""
    ours = _Page(page).counts
    flat = [token for block in tokens(markdown) for token in (block, *(block.children or ()))]
    theirs = Counter(token.tag for token in flat if token.nesting == 1 or token.type == "image")
    theirs["pre"] = sum(token.type in ("fence", "code_block") for token in flat)
    return [f"{ours[tag]} <{tag}>, on GitHub {theirs[tag]}" for tag in _COUNTED if ours[tag] != theirs[tag]]


def problems(site: Path) -> Iterator[str]:
    """Everything that is wrong with a built site."""
    for file in sorted(site.rglob("*")):
        if file.suffix in (".html", ".css"):
            for address in foreign_loads(file.read_text(encoding="utf-8"), suffix=file.suffix):
                yield f"{file.relative_to(site)}: loads {address}"
    for command, cls in pages.config_classes().items():
        page = f"reference/config/{command.replace(' ', '_')}.html"
        missing = {entry.path for entry in entries(cls) if isinstance(entry, Key)} - _ids(site / page)
        yield from (f"{page}: no key {key}" for key in sorted(missing))
    for package in pages.packages():
        page = f"reference/api/{package}.html"
        ids = _ids(site / page)
        for module, name in pages.public_names(package):
            if f"{package}.{module}.{name}" not in ids:
                yield f"{page}: no public name {name} of {module}"
    for name, file in pages.markdown_files().items():
        # What the upgrade guide has on the site only is checked by a test.
        if name != pages.UPGRADING:
            text = (site / _html(name)).read_text(encoding="utf-8")
            for difference in differences_from_github(file.read_text(encoding="utf-8"), text):
                yield f"{name}: {difference}"


def find_in_browser(site: Path, browser: str, word: str) -> list[str]:
    """Pages of the site that its search finds in Chromium, without a server, the best first."""
    page = (site / "index.html").resolve().as_uri() + f"?q={word}"
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        # The document is printed once nothing is left to load.
        command += [f"--user-data-dir={profile}", "--virtual-time-budget=60000", "--dump-dom", page]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    root = re.escape(site.resolve().as_uri())
    links = re.findall(rf'<a href="{root}/([^"?#]+)[^"]*" class="md-search-result__link"', done.stdout)
    return list(dict.fromkeys(links))


def _search_problems(site: Path, browser: str) -> Iterator[str]:
    word, page = "staleness", "docs/async.html"
    try:
        results = find_in_browser(site, browser, word)
    except subprocess.SubprocessError as error:
        yield f"the search cannot be tried: {error}"
        return
    if page not in results:
        yield f"index.html?q={word}: the search finds {', '.join(results) or 'nothing'}, not {page}"


def _html(page: str) -> str:
    """The file of a page; that of README.md is index.html."""
    return re.sub(r"(^|/)README\.md$", r"\1index.md", page).removesuffix(".md") + ".html"


def _ids(page: Path) -> set[str]:
    return _Page(page.read_text(encoding="utf-8")).ids


def _addresses_in_style(text: str) -> list[str]:
    pairs = re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""", text)
    return [address for pair in pairs for address in pair if address]


def main() -> int:
    """Checks the site in the folder that the first argument names; returns the exit code."""
    site = Path(sys.argv[1])
    errors = list(problems(site))
    browser = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if browser is not None:
        errors += _search_problems(site, browser)
    for problem in errors:
        print(f"error: {problem}", file=sys.stderr)
    if not errors:
        num_keys = sum(isinstance(entry, Key) for cls in pages.config_classes().values() for entry in entries(cls))
        num_names = sum(len(pages.public_names(package)) for package in pages.packages())
        num_pages = len(list(site.rglob("*.html")))
        print(
            f"docs: {site}: {num_pages} pages with {num_keys} keys and {num_names} public names, "
            + ("its search tried" if browser else "its search not tried (no Chromium)")
        )
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
