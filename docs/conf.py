"""Configure Sphinx; build.py collects the pages, pages.py adapts them."""

import tomllib

from docs._ext.address import ROOT, addresses
from docs._ext.formulas import install

project = "Hands-on RLHF"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"{project} {version}"
html_last_updated_fmt = "%Y-%m-%d"
html_baseurl = addresses().get("homepage", "")
language = "en"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docs._ext.formulas",
    "docs._ext.pages",
    "docs._ext.languages",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "source", ".yaml": "source"}
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"rlhf_course\.\w+\..*")]  # only source pages show private names
autodoc_typehints = "none"

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the committed outputs

html_theme = "furo"
BRAND = ("color-brand-primary", "color-brand-content", "color-brand-visited")
html_static_path = ["static", str(install())]
templates_path = ["templates"]
PLACES = "brand search scroll-start navigation scroll-end"
html_sidebars = {"**": [f"sidebar/{name}.html" for name in PLACES.split()]}
html_sidebars["**"].insert(2, "language.html")
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_favicon = "static/favicon.svg"
html_copy_source = False  # the notebooks are next to their pages
html_show_copyright = False
html_use_index = False  # the glossary and the search replace it
html_theme_options = {
    "light_css_variables": {name: "#0072B2" for name in BRAND} | {"figure-filter": "none"},
    "dark_css_variables": {name: "#56B4E9" for name in BRAND}
    | {"figure-filter": "invert(0.92) hue-rotate(180deg)"},
}
copybutton_selector = "div.cell_input pre, .highlight-python pre, .highlight-bash pre"
