"""The page of a report, taken apart: its tags, its text, and the block of JSON that its scripts read."""

import html.parser
import json
from dataclasses import replace

FETCHES = ("src", "href", "action", "data", "poster", "srcset", "background", "formaction", "ping", "manifest")
VOID = ("meta", "input", "br", "link", "img")


class Page(html.parser.HTMLParser):
    """Which tags a page opens, the attributes that could fetch something, its scripts, and its text."""

    def __init__(self, text):
        super().__init__()
        self.source, self.tags, self.links, self.open = text, [], [], []
        self.words, self.scripts, self.policy, self.data = [], [], "", None
        self.texts = {}  # by the id of the innermost element that has one
        self.ids = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in FETCHES]
        assert not any(k.startswith("on") for k, _ in attrs), "scripts stand in their own blocks"
        if known.get("http-equiv") == "Content-Security-Policy":
            self.policy = known["content"]
        if tag not in VOID:
            self.open.append(tag)
            self.ids.append(known.get("id", self.ids[-1] if self.ids else ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.ids.pop()

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "script" and self.ids[-1] == "report-data":
            self.data = json.loads(data)
        elif inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.words.append(data)
            self.texts[self.ids[-1] if self.ids else ""] = (
                self.texts.get(self.ids[-1] if self.ids else "", "") + f" {data}"
            )

    def text(self, of=None):
        """Return the text of the page, or of the element with an id, with single spaces."""
        return " ".join((" ".join(self.words) if of is None else self.texts[of]).split())

    def column(self, name, graph=0, side="after"):
        """Return a property of all nodes of a graph."""
        strings, values = self.data["strings"], self.data["graphs"][graph][side][name]
        return values if name in ("bytes", "flops", "edges", "casts") else [strings[i] for i in values]


def copies_of(report, count, **changes):
    """Return a report whose only graph has its nodes ``count`` times."""
    (graph,) = report.graphs
    nodes = tuple(
        replace(n, name=f"{n.name}.{i}", sources=tuple(f"{source}.{i}" for source in n.sources), **changes)
        for i in range(count)
        for n in graph.nodes
    )
    return replace(report, graphs=(replace(graph, nodes=nodes, captured=()),))
