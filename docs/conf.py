"""Configuration of the documentation site: `sphinx-build -W docs docs/_build`."""

import tparmpi

project = "tparmpi"
release = tparmpi.__version__
html_theme = "furo"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "none"
napoleon_use_ivar = True
