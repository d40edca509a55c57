"""A page as a test reads it: its tags, its words, and what it would load."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of figures and styles."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("svg", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside and data.strip():
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.words)


def loads_nothing(page: Page) -> bool:
    """No script, and no address but those inside of the page."""
    for tag, attributes in page.tags:
        if tag in ("script", "iframe", "img", "object", "embed", "base"):
            return False
        if tag == "link" and attributes["href"] != "data:,":
            return False
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                if not (value or "").startswith(("#", "data:")):
                    return False
            elif name.startswith("on"):
                return False
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.source)
    outside = re.sub(r"<metadata>.*?</metadata>", "", outside, flags=re.DOTALL)
    return not re.findall(r"https?://[^\s\"<]*|@import|url\((?!#)", outside)
