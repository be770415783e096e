"""Sphinx's settings for the site. scripts/site.sh builds it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

project = "Waybill"
author = "the authors of Waybill"
project_copyright = "the authors of Waybill; Apache-2.0"
release = version = re.search(
    r"project\(\s*waybill\s+VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()
).group(1)

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
nitpicky = True
myst_heading_anchors = 6  # links name headings as code hosts do

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
