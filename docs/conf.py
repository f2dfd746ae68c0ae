"""Sphinx settings: `make docs` builds the site into build/docs, and a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import smoothhess

project = "smoothhess"
author = "The smoothhess developers"
copyright = author
release = version = smoothhess.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "_sphinx.docstrings",
    "_sphinx.mathml",
]
exclude_patterns = ["_sphinx"]
nb_execution_mode = "off"  # docs/notebooks/make.py runs the notebooks and stores their outputs
nb_merge_streams = True

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
html_math_renderer = "mathml"

# Docstrings are plain text with `code` in backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "smoothhess"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
highlight_language = "text"
