"""What the site needs beyond mkdocs: files outside of docs/ that a page links to become pages of their own.

In the repository a link such as `../examples/one_rollout.py` leads to the file. The site has no such folder, so it
shows the file as a page, and the link leads to that.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
MERMAID = re.compile(r"<script src=[^>]*mermaid\.min\.js[^>]*></script>")
LANGUAGES = {".py": "python", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".ts": "typescript"}


def page_of(path: str) -> str:
    """Where the site shows a file of the repository, both as paths with forward slashes, from their roots."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.lower() if path.endswith(".md") and "/" not in path else f"files/{path}.md"


def outside(text: str, folder: str) -> set[str]:
    """The files outside of docs/ that a text in this folder of the repository links to."""
    found = {posixpath.normpath(posixpath.join(folder, target)) for target in LINK.findall(text)}
    return {path for path in found if not path.startswith("docs/") and (ROOT / path).is_file()}


def relinked(text: str, folder: str, page: str) -> str:
    """The text of a file in this folder of the repository, with its links as this page of the site needs them."""

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return (
            posixpath.relpath(page_of(target), posixpath.dirname(page) or ".") if (ROOT / target).exists() else link[1]
        )

    return LINK.sub(lead, text)


def shown(path: str) -> str:
    """A file outside of docs/ as a page in Markdown."""
    text, folder = (ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path)
    if path.endswith(".md"):
        return relinked(text, folder, page_of(path))
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    new = {"CHANGELOG.md"}
    for file in files.documentation_pages():
        new |= outside(file.content_string, posixpath.dirname(f"docs/{file.src_uri}"))
    there: set[str] = set()
    while new := new - there:
        there |= new
        for path in sorted(new):
            files.append(File.generated(config, page_of(path), content=shown(path)))
        pages = [path for path in new if path.endswith(".md")]
        new = {
            path
            for page in pages
            for path in outside((ROOT / page).read_text(encoding="utf-8"), posixpath.dirname(page))
        }
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), page.file.src_uri)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Only pages with a diagram load what draws it, which is large; a page under zh/ says that it is in Chinese."""
    if 'class="mermaid"' not in output:
        output = MERMAID.sub("", output)
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output
