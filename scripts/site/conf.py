"""Sphinx's settings for the site. scripts/site.sh builds it."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

sys.path.append(str(Path(__file__).parent))
import reference

ROOT = Path(__file__).resolve().parents[2]

project = "Waybill"
author = "the authors of Waybill"
project_copyright = "the authors of Waybill; Apache-2.0"
release = version = re.search(
    r'version_text = "([0-9.]+)"', (ROOT / "include" / "waybill" / "version.h").read_text()
).group(1)

extensions = [
    "myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe",
]  # fmt: skip
root_doc = "index"
# Links of pages are all checked; types of signatures where they are public names of the package.
nitpicky = True
nitpick_ignore_regex = [("cpp:.*", ".*"), ("py:class", r"(?!waybill(\.moe|\.torch)?\.[A-Z]).*")]
# Every header opens the same namespace; a field of a dataclass is named as a field of another.
suppress_warnings = ["duplicate_declaration.cpp", "ref.python"]
myst_heading_anchors = 6  # links name headings as code hosts do

autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = cpp_maximum_signature_line_length = 88
autodoc_mock_imports = reference.FOREIGN
reference.stand_in()
breathe_projects = {"waybill": str(ROOT / "build" / "site" / "doxygen" / "xml")}
breathe_default_project = "waybill"
breathe_show_include = False  # the page of a header says it

html_theme = "furo"
html_title = "Waybill"
html_static_path = ["static"]
html_css_files = ["waybill.css"]
templates_path = ["templates"]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None  # the same sources give the same pages
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_exclude = ".linenos, .gp, .go"


def public_bases(_app, _name, _value, _options, bases):
    """Leaves out bases that no user names."""
    bases[:] = [b for b in bases if "._" not in f"{b.__module__}.{b.__qualname__}"] or [object]


def plain_raises(_app, _what, _name, _value, _options, lines):
    """What comes after "Raises:" is prose here, or a list where its lines begin with a name."""
    if "Raises:" not in lines:
        return
    begin = lines.index("Raises:")
    end = begin + 1
    while end < len(lines) and (not lines[end] or lines[end].startswith(" ")):
        end += 1
    items = [""]
    for line in lines[begin + 1 : end]:
        if re.match(r"    \w+: ", line) and items[-1]:
            items.append("")
        items[-1] = f"{items[-1]} {line.strip()}".strip()
    text = [f"- {item}" for item in items] if len(items) > 1 else items
    lines[begin:end] = ["**Raises**", "", *text, ""]


def without_namespaces(_app, tree):
    """What a header declares stands on its page itself, not inside of ``namespace waybill``. Titles
    of parts of a class are the same in each class, and no place that is linked.
    """
    for node in list(tree.findall(addnodes.desc)):
        if node.astext().startswith("namespace waybill"):
            node.replace_self([nodes.target(ids=node[0]["ids"]), *node[-1].children])
    for node in tree.findall(nodes.rubric):
        node["ids"] = []


def setup(app):
    app.connect("autodoc-process-docstring", plain_raises, priority=100)  # before napoleon
    app.connect("autodoc-process-bases", public_bases)
    app.connect("doctree-read", without_namespaces, priority=100)  # before contents are listed
