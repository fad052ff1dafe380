"""Configuration of Sphinx for ``make docs``. The build needs no network."""

import sys
from importlib.metadata import metadata
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

from source_links import linkcode_resolve  # noqa: E402, F401

project = "lrl"
author = "the authors of lrl"
copyright = author
release = version = version_of("lrl")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.napoleon",
    "mathml",
    "source_links",
    "api_pages",
]
exclude_patterns = ["_build", "_extensions"]
suppress_warnings = ["ref.python"]  # type hints have short class names, which can be ambiguous

html_theme = "furo"
html_title = "lrl"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["lrl.css"]
html_js_files = ["copy.js"]
html_logo = html_favicon = "_static/lrl.svg"
html_search_scorer = str(HERE / "_static/scorer.js")
html_math_renderer = "mathml"
# The package's metadata has the address of the repository, if it is published.
urls = dict(url.split(", ") for url in metadata("lrl").get_all("Project-URL") or ())
html_theme_options = {"source_repository": urls["Repository"]} if "Repository" in urls else {}
if html_theme_options:
    html_theme_options |= {"source_branch": "main", "source_directory": "docs/"}

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # Lightning's and PyTorch's docstrings refer to their own pages
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_display_short_literal_types = True
