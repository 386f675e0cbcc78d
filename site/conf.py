"""Sphinx settings of the site; build.py collects the pages, pages.py makes them fit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Hands-on RLHF"
html_title = project
language = "en"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx_copybutton", "pages"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "source", ".yaml": "source"}
exclude_patterns = ["README.md"]  # index.md includes it
nitpicky = True

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the outputs are those that are committed

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_copy_source = False  # the notebooks themselves lie beside their pages
html_show_copyright = False
html_use_index = False  # the glossary and the search are
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
copybutton_selector = "div.cell_input pre, .highlight-python pre, .highlight-bash pre"

mathjax_path = "mathjax/tex-svg.js"  # one file with its glyphs, no request to any other host
mathjax4_config = None
mathjax3_config = {"options": {"enableMenu": False}}
