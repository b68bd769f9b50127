"""Bridges GitHub's reading of docs/ and that of mkdocs; called by ``mkdocs build``, named in mkdocs.yml.

- A link out of docs/ (``../CONTRIBUTING.md``, ``../examples/x.py``) leads to a page that shows that file.
- ``<!-- api: amp_graph.convert.convert -->``, invisible on GitHub, is replaced by the reference from the docstrings.
- A page that fetches something from a network is a warning.
- What GitHub shows and Python-Markdown does not, such as a list right after a paragraph, is a warning; ``--strict``
  fails on it.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOG = logging.getLogger("mkdocs.hooks.site")
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")
API = re.compile(r"^<!-- api: (\S+) -->$", re.MULTILINE)
FETCHED = re.compile(r"""<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)=["']?https?:[^>]*>""")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
TIGHT_LIST = re.compile(r"^(?![-*|>#\s<]|\d+\. ).+\n(?:[-*] |\d+\. )", re.MULTILINE)
TEXT = {".md": "", ".py": "python", ".toml": "toml", ".c": "c"}
OUTSIDE = "repository"  # the folder of the site with files from outside of docs/


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add a page for each file of the repository that a page links to, and for those that these link to."""
    from mkdocs.structure.files import File, InclusionLevel

    open_pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while open_pages:
        name = open_pages.pop()
        for target in sorted(linked(name, shown(name))):
            uri = site_uri(target)
            if not uri.startswith(OUTSIDE) or files.get_file_from_path(uri) is not None:
                continue
            files.append(File.generated(config, uri, content=shown(target), inclusion=InclusionLevel.NOT_IN_NAV))
            open_pages.append(target)
    return files


def linked(name: str, text: str) -> Iterator[str]:
    """Yield the files outside of docs/, and its pages, that the page ``name`` of the repository links to."""
    for path, _ in LINK.findall(CODE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if (ROOT / target).exists():
            yield target


def shown(target: str) -> str:
    """Return the page that shows a file: a page of Markdown as it is, other text as code, a folder as its files."""
    if (ROOT / target).is_dir():
        names = sorted(path.name for path in (ROOT / target).iterdir() if path.suffix in TEXT)
        return "\n".join([f"# {target}", "", *(f"- [{name}]({Path(target).name}/{name})" for name in names)])
    text = (ROOT / target).read_text()
    if target.endswith(".md"):
        return text
    return f"# {target}\n\n````{TEXT.get(Path(target).suffix, 'text')}\n{text}\n````\n"


def site_uri(target: str) -> str:
    """Return where a file of the repository is in the site."""
    if target.startswith("docs/") and Path(target).suffix not in (".py", ".dot"):
        return target.removeprefix("docs/")
    return f"{OUTSIDE}/{target}" if target.endswith(".md") else f"{OUTSIDE}/{target}.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/, put in references, and warn of what would be shown differently."""
    uri = page.file.src_uri
    name = uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(OUTSIDE) else f"docs/{uri}"
    page.meta.setdefault("search", {"exclude": True} if uri.startswith(OUTSIDE) else {})
    for found in TIGHT_LIST.findall(FENCE.sub("", markdown)):
        LOG.warning("%s: a list needs an empty line before it: %r", name, found)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1]))
        if not (ROOT / target).exists():
            return match[0]  # mkdocs warns of it
        return posixpath.relpath(site_uri(target), posixpath.dirname(uri) or ".") + (match[2] or "")

    return API.sub(reference, outside_of_code(moved, markdown))


def outside_of_code(moved: Any, markdown: str) -> str:
    """Rewrite the links of ``markdown`` that are not in code."""
    parts, last = [], 0
    for code in CODE.finditer(markdown):
        # A link's text may hold code, `[`x`](y)`: what follows is read on from here.
        parts += [LINK.sub(moved, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, LINK.sub(moved, markdown[last:])])


def reference(match: re.Match[str]) -> str:
    """Return mkdocstrings' words for a name, shown with its signature below the heading that the page gives it."""
    return "\n".join([f"::: {match[1]}", "    options:", "      show_root_toc_entry: false", "      heading_level: 4"])


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Show ``|`` in tables as GitHub does; warn of Markdown that was not understood."""
    text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    for sign in (" **", "`", "](", "\n| "):
        if sign in text:
            where = text.index(sign)
            LOG.warning("%s: not shown as on GitHub: %r", page.file.src_uri, text[max(0, where - 40) : where + 40])
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn of what a page fetches."""
    for tag in FETCHED.findall(output):
        LOG.warning("%s: fetched from a network: %s", page.file.src_uri, tag)
    return output
