"""How wide the library's pages are on a small screen: the part of CSS that they use, computed."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link"}
NO_TEXT = {"style", "title", "script"}
#: Width of a letter, in its size: wide ones, so that what fits here fits in a browser.
LETTER, MONO_LETTER = 0.56, 0.62
LENGTH = re.compile(r"^(-?[\d.]+)(px|rem|em)$")


class Element:
    def __init__(self, tag, attributes, parent):
        self.tag, self.attributes, self.parent = tag, dict(attributes), parent
        self.children = []  # Element or str
        self.style = {}

    @property
    def classes(self):
        return (self.attributes.get("class") or "").split()

    def named(self):
        return "".join([self.tag, *(f".{name}" for name in self.classes)])

    def walk(self):
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()


class _Tree(HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = self.at = Element("page", {}, None)

    def handle_starttag(self, tag, attributes):
        element = Element(tag, attributes, self.at)
        self.at.children.append(element)
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag, attributes):
        self.at.children.append(Element(tag, attributes, self.at))

    def handle_endtag(self, tag):
        assert self.at.tag == tag, (self.at.tag, tag)
        self.at = self.at.parent

    def handle_data(self, text):
        self.at.children.append(text)


def _rules(css, viewport):
    """(selector, declarations) that hold on a light screen of that width."""
    while media := re.search(r"@media\s*([^{]*)\{((?:[^{}]*\{[^{}]*\})*)[^{}]*\}", css):
        limits = re.findall(r"\((min|max)-width:(\d+)px\)", media[1])
        holds = bool(limits) and all(
            viewport >= int(px) if kind == "min" else viewport <= int(px) for kind, px in limits
        )
        css = css[: media.start()] + (media[2] if holds else "") + css[media.end() :]
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
        pairs = (part.split(":", 1) for part in body.split(";") if ":" in part)
        declared = {name.strip(): value.strip() for name, value in pairs}
        for selector in selectors.split(","):
            yield selector.strip(), declared


def _is(element, simple):
    tag, *classes = simple.split(".")
    return tag in ("", "*", element.tag) and set(classes) <= set(element.classes)


def _matches(element, selector):
    *outer, last = selector.split()
    if not _is(element, last):
        return False
    for simple in reversed(outer):
        element = element.parent
        while element and not _is(element, simple):
            element = element.parent
        if not element:
            return False
    return True


def _weight(selector):
    return selector.count("."), len(re.findall(r"(?:^|\s)\w", selector))


INHERITED = ("font-size", "white-space", "overflow-wrap", "font")


class NarrowPage:
    """A page on a screen of ``viewport`` pixels; trouble(): what does not fit or is too small."""

    def __init__(self, page, viewport=400, smallest_px=9.0):
        self.viewport, self.smallest_px = viewport, smallest_px
        tree = _Tree()
        tree.feed(page)
        self.elements = list(tree.root.walk())
        css = "".join(e.children[0] for e in self.elements if e.tag == "style")
        rules = [rule for rule in _rules(css, viewport) if ":" not in rule[0]]
        rules.sort(key=lambda rule: _weight(rule[0]))
        for element in self.elements:
            for selector, declared in rules:
                if _matches(element, selector):
                    element.style.update(declared)
            self._inherit(element)
        self.body = next(e for e in self.elements if e.tag == "body")
        self.found = []

    def _inherit(self, element):
        outer = element.parent.style if element.parent else {}
        size = outer.get("px", 16.0)
        if "font" in element.style:  # size/line families
            element.style.setdefault("font-size", element.style["font"].split("/")[0])
        element.style["px"] = self._length(element.style.get("font-size", ""), size, size)
        for name in INHERITED[1:]:
            if name in outer:
                element.style.setdefault(name, outer[name])

    @staticmethod
    def _length(text, em, otherwise=0.0):
        found = LENGTH.match(text)
        if not found:
            return otherwise
        return float(found[1]) * {"px": 1.0, "rem": 16.0, "em": em}[found[2]]

    def _sides(self, element, name):
        """Left and right of padding or margin together; the border is thin."""
        parts = element.style.get(name, "0").split()
        right = parts[min(1, len(parts) - 1)]
        left = parts[3] if len(parts) == 4 else right
        return sum(max(0.0, self._length(side, element.style["px"])) for side in (left, right))

    def _text(self, element, text):
        letter = MONO_LETTER if "mono" in element.style.get("font", "") else LETTER
        letter *= element.style["px"]
        if element.style.get("overflow-wrap") == "anywhere":
            return letter
        nowrap = element.style.get("white-space") == "nowrap"
        words = [" ".join(text.split())] if nowrap else re.split(r"[\s-]+", text)
        return letter * max(map(len, words))

    def needs(self, element):
        """The least width, in pixels, that shows all of the element."""
        style = element.style
        if element.tag in NO_TEXT or style.get("display") == "none":
            return 0.0
        around = self._sides(element, "padding") + self._sides(element, "margin")
        around += 2 if "border" in style else 0
        if element.tag == "svg" or "width" in style:
            inside = max(
                self._length(style.get(w, ""), style["px"]) for w in ("width", "min-width")
            )
            if element.tag == "svg":
                return inside + around
        else:
            inside = 0.0
        parts = [
            self.needs(child) if isinstance(child, Element) else self._text(element, child)
            for child in element.children
        ]
        if style.get("overflow-x") == "auto":
            return around
        if element.tag == "tr":
            return around + sum(parts)
        if columns := style.get("grid-template-columns"):
            return around + self._columns(columns, style, max(parts, default=0.0))
        return around + max([inside, *parts])

    def _columns(self, columns, style, widest):
        gap = self._length(style.get("gap", "0").split()[-1], style["px"])
        least = re.match(r"repeat\(auto-fit,minmax\((\w+),1fr\)\)", columns)
        if least:
            return max(self._length(least[1], style["px"]), widest)
        widths = re.findall(r"minmax\([^)]*\)|\S+", columns)
        fixed = sum(self._length(width, style["px"]) for width in widths)
        free = [width for width in widths if width in ("1fr", "auto")]
        return fixed + gap * (len(widths) - 1) + (widest if free else 0.0)

    def _room(self, element):
        """Pixels that an element's parent leaves it, on the way from the edge of the screen."""
        room, at = float(self.viewport), element.parent
        while at and at.tag != "html":
            limit = self._length(at.style.get("max-width", ""), 16, room)
            room = min(room, limit)
            room -= self._sides(at, "padding") + (2 if "border" in at.style else 0)
            at = at.parent
        return room

    def _drawn_text(self, svg):
        """The sizes on the screen of a drawing's texts; with a viewBox it shrinks to its room."""
        box = svg.attributes.get("viewbox")
        scale = 1.0
        if box:
            width = self._length(svg.style.get("width", ""), svg.style["px"], self._room(svg))
            width = max(width, self._length(svg.style.get("min-width", ""), svg.style["px"]))
            limit = self._length(svg.style.get("max-width", ""), svg.style["px"], width)
            scale = min(width, limit) / float(box.split()[2])
        for text in svg.walk():
            if text.tag == "text" and text.style.get("display") != "none":
                yield scale * text.style["px"]

    def trouble(self):
        found = []
        if not any(
            e.tag == "meta"
            and e.attributes.get("name") == "viewport"
            and "width=device-width" in e.attributes.get("content", "")
            for e in self.elements
        ):
            found.append("no viewport of the device's width")
        for element in self.body.walk():
            if element.tag in ("section", "header", "footer", "pre", "p", "li", "h1", "figure"):
                room = self._room(element)
                if (needs := self.needs(element)) > room:
                    found.append(f"{element.named()} needs {needs:.0f} of {room:.0f} pixels")
            if element.tag == "svg":
                for size in self._drawn_text(element):
                    if size < self.smallest_px:
                        found.append(f"text of {element.named()} has {size:.1f} pixels")
            elif element.style["px"] < self.smallest_px:
                found.append(f"{element.named()} has {element.style['px']:.1f} pixels")
        return sorted(set(found))
