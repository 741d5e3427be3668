"""The documentation site without MkDocs: its navigation, the generated pages, links, and what its checks find.

`make docs` builds the site and runs the same checks on its pages.
"""

import importlib
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts.docs_site import pages
from scripts.docs_site.check import differences_from_github, foreign_loads

NAV = yaml.safe_load((pages.REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
GENERATED = pages.generated_pages()


def test_every_page_is_in_the_navigation_once() -> None:
    known = [*pages.markdown_files(), *GENERATED]
    shown = list(pages.nav_pages(pages.expand_nav(NAV, known)))
    assert sorted(shown) == sorted(known), "name new pages in mkdocs.yml"


def test_a_pattern_in_the_navigation_takes_what_no_other_entry_names() -> None:
    nav = ["a/one.md", {"More": ["a/*.md", {"Last": "a/z.md"}]}]
    known = ["a/z.md", "a/two.md", "a/one.md", "a/deep/three.md", "b.md"]
    assert pages.expand_nav(nav, known) == ["a/one.md", {"More": ["a/two.md", {"Last": "a/z.md"}]}]
    with pytest.raises(ValueError, match=r"a/\*\.rst, which no page matches"):
        pages.expand_nav(["a/*.rst"], known)


def test_every_app_has_a_page_of_its_keys() -> None:
    apps = {file.parent.name for file in (pages.REPO / "apps").glob("*/config.py")}
    assert {command.split()[0] for command in pages.config_classes()} >= apps
    assert "`trainer.max_staleness` {: #trainer.max_staleness }" in GENERATED["reference/config/grpo.md"]
    assert "reference/config/bench_stage_gate.md" in GENERATED


@pytest.mark.parametrize("package", pages.packages())
def test_the_page_of_a_package_has_all_its_public_names(package: str) -> None:
    named = re.findall(r"^::: (\S+)$", GENERATED[f"reference/api/{package}.md"], re.MULTILINE)
    assert sorted(name.rpartition(".")[2] for name in named) == sorted(importlib.import_module(package).__all__)


def test_the_upgrade_guide_names_what_was_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.findall(r"^### (\w+) ", pages.upgrade_tables(), re.MULTILINE) == pages.packages()
    monkeypatch.setattr(pages.config_classes()["ppo"], "RENAMED_KEYS", {"rollouts": "rollout"}, raising=False)
    monkeypatch.setattr(pages, "renamed_names", lambda: {"ckpt.Ranks": "ckpt.SaverRanks"})
    tables = pages.upgrade_tables()
    assert "| `rollouts` | `rollout` | ppo |" in tables
    assert "| `ckpt.Ranks` | `ckpt.SaverRanks` |" in tables


def test_pins_have_hashes_and_agree_with_those_of_the_stack() -> None:
    lines = (pages.REPO / "3rdparty/docs.txt").read_text(encoding="utf-8").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==([\w.!]+)(?: --hash=sha256:[0-9a-f]{64})+", line) for line in lines]
    assert None not in pins
    stack = dict(re.findall(r"^([\w.-]+)==([\w.!]+)", (pages.REPO / "3rdparty/cpu.txt").read_text(), re.MULTILINE))
    assert {pin[1]: pin[2] for pin in pins if pin and stack.get(pin[1], pin[2]) != pin[2]} == {}


def test_links_are_resolved_as_in_the_repository() -> None:
    linked = pages.linked_path
    assert linked("docs/examples.md", "../packages/rl_core#guarantees") == "packages/rl_core/README.md"
    assert linked("docs/examples.md", "../apps/grpo/main.py") == "apps/grpo/main.py"
    assert linked("README.md", "docs/data.md#files") == "docs/data.md"
    assert linked("README.md", "docs/gone.md") is None
    assert linked("README.md", "#the-demo") is None
    assert linked("README.md", "https://example.org/README.md") is None
    assert linked("README.md", "../elsewhere/README.md") is None


def test_a_page_of_code_is_not_ended_by_the_code() -> None:
    text = pages.source_page(pages.REPO / "scripts/docs_site/pages.py")
    code = (pages.REPO / "scripts/docs_site/pages.py").read_text(encoding="utf-8")
    fence = re.search(r"^(`+)python$", text, re.MULTILINE)
    assert fence is not None
    assert text.endswith(f"python\n{code}{fence[1]}\n")
    assert fence[1] not in code


def test_list_items_are_indented_by_four() -> None:
    markdown = "* a\n  lazy\n  * b\n\n    c\nlazy too\n\n1. d\n\n   ```\n   e\n     f\n   ```\n\ntext\n    code"
    assert pages.lists_by_four(markdown) == (
        "* a\n    lazy\n    * b\n\n        c\n        lazy too\n\n"
        "1. d\n\n    ```\n    e\n      f\n    ```\n\ntext\n    code"
    )


@given(
    st.lists(st.sampled_from(["text", "# head", "| a |", "```\nx\n```", "    code", ""]), max_size=8).map("\n\n".join)
)
def test_text_without_lists_stays_as_it_is(markdown: str) -> None:
    assert pages.lists_by_four(markdown) == markdown


@pytest.mark.parametrize(
    ("loading", "address"),
    [
        ('<script src="https://cdn.example/a.js"></script>', "https://cdn.example/a.js"),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', "//fonts.example/a.css"),
        ('<link rel="preconnect" href="https://fonts.example" crossorigin>', "https://fonts.example"),
        ('<p><img alt="" src="HTTP://img.example/a.png"></p>', "HTTP://img.example/a.png"),
        ("<style>a { background: url('https://img.example/b.png') }</style>", "https://img.example/b.png"),
        ('<div style="background: url(//img.example/c.png)">', "//img.example/c.png"),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(loading: str, address: str) -> None:
    assert foreign_loads(f"<html><body>{loading}</body></html>") == [address]


def test_links_and_own_files_are_no_foreign_loads() -> None:
    page = '<link rel="canonical" href="https://a.example/"><a href="https://b.example/">b</a><script src="../a.js">'
    assert foreign_loads(page + '</script><img src="data:image/svg+xml,http://www.w3.org/2000/svg">') == []
    assert foreign_loads("@import 'https://c.example/c.css';", suffix=".css") == ["https://c.example/c.css"]


def test_a_list_that_is_lost_on_the_site_is_found() -> None:
    markdown = "# Head\n\ntext\n* one\n* two\n"
    assert differences_from_github(markdown, "<article><h1>Head</h1><ul><li>one<li>two</ul></article>") == []
    assert differences_from_github(markdown, "<article><h1>Head</h1><p>text * one * two</p></article>") == [
        "0 <ul>, on GitHub 1",
        "0 <li>, on GitHub 2",
    ]
