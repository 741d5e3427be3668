"""Hook of MkDocs: pages are the Markdown files of the whole repository, under their paths in it, and generated ones.

Links to folders become links to their README, and links to code become links to a page that shows it. MkDocs resolves
and checks all others itself.
"""

import posixpath
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.docs_site import pages
from scripts.markdown_links import slug

_generated = pages.generated_pages()


class _Links(Treeprocessor):
    """Rewrites the links of the page that is being rendered; runs before MkDocs' own processor of links."""

    page = ""

    def run(self, root: Element) -> None:
        for element in root.iter("a"):
            link = element.get("href", "")
            path = pages.linked_path(self.page, link)
            if path is not None:
                anchor = link.partition("#")[1] + link.partition("#")[2]
                place = posixpath.relpath(_place(path), posixpath.dirname(self.page) or ".")
                element.set("href", place + anchor)


class _LongCells(Treeprocessor):
    """Marks table cells with sentences, which docs/site.css gives more width on a phone."""

    def run(self, root: Element) -> None:
        for cell in root.iter("td"):
            if len("".join(cell.itertext())) > 80:
                cell.set("class", "long")


class _PlinthExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Links(md), "plinth_links", 1)
        md.treeprocessors.register(_LongCells(md), "plinth_long_cells", 0)


def _place(path: str) -> str:
    """The path at which the site has a file of the repository: code has a page of its own."""
    return f"source/{path}.md" if posixpath.splitext(path)[1] in pages.CODE else path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    known = [*pages.markdown_files(), *_generated]
    config.nav = pages.expand_nav(config.nav or [], known)
    # Anchors are GitHub's.
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: slug(text)
    config.markdown_extensions.append(_PlinthExtension())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files.documentation_pages()) + list(files.media_files()):
        if (file.abs_src_path or "").startswith(config.docs_dir):
            files.remove(file)
    markdown = pages.markdown_files()
    texts = dict(_generated)
    raw = pages.assets()
    for page, path in markdown.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            linked = pages.linked_path(page, link)
            if linked is None or linked in markdown or not (pages.REPO / linked).is_file():
                continue
            if _place(linked) == linked:
                raw[linked] = pages.REPO / linked
            else:
                texts[_place(linked)] = pages.source_page(pages.REPO / linked)
    for name, path in {**markdown, **raw}.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the search index as a script too: a page that is opened as a file can read nothing else."""
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}\n", encoding="utf-8")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    _Links.page = page.file.src_uri
    if page.file.src_uri == pages.UPGRADING:
        markdown += "\n" + pages.upgrade_tables()
    return pages.lists_by_four(markdown)
