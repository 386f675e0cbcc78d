"""Configure Sphinx; collect.py collects the pages, pages.py adapts them."""

import tomllib

import yaml

from docs._ext.address import ROOT, addresses
from docs._ext.formulas import install

project = "Hands-on RLHF"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"{project} {version}"
html_last_updated_fmt = "%Y-%m-%d"
homepage = addresses().get("homepage")
html_baseurl = f"{homepage}/" if homepage else ""
language = "en"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_reredirects",
    "docs._ext.formulas",
    "docs._ext.pages",
    "docs._ext.languages",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "source", ".yaml": "source"}
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"rlhf_course\.\w+\..*")]  # only source pages show private names
autodoc_typehints = "none"

# A site without an address has no sitemap and no previews: both need absolute addresses.
if homepage:
    extensions += ["sphinx_sitemap", "sphinxext.opengraph"]
sitemap_url_scheme = "{link}"
sitemap_excludes = ["404.html", "search.html"]
ogp_site_url = html_baseurl
ogp_type = "article"
ogp_description_length = 160
ogp_social_cards = {"enable": False}  # they draw a picture per page
ogp_image = f"{homepage}/_images/rlhf_stages.svg"

# Pages that have moved: the old address leads on.
moved = yaml.safe_load((ROOT / "docs/redirects.yaml").read_text(encoding="utf-8"))
redirects = {old: f"/{new}.html" for old, new in moved.items()}

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the committed outputs

html_theme = "furo"
html_static_path = ["static", str(install())]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "language.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_favicon = "static/favicon.svg"
html_copy_source = False  # the notebooks are next to their pages
html_show_copyright = False
html_use_index = False  # the glossary and the search replace it
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0072B2",
        "color-brand-content": "#0072B2",
        "color-brand-visited": "#0072B2",
        "figure-filter": "none",
    },
    "dark_css_variables": {
        "color-brand-primary": "#56B4E9",
        "color-brand-content": "#56B4E9",
        "color-brand-visited": "#56B4E9",
        "figure-filter": "invert(0.92) hue-rotate(180deg)",
    },
}
copybutton_selector = "div.cell_input pre, .highlight-python pre, .highlight-bash pre"
