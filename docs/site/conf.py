"""Sphinx's configuration, for tools/make_docs.py, which lays out the pages."""

import torch

project = "veScale"
author = "the veScale authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "veScale"
html_static_path = ["pages.css"]
html_css_files = ["pages.css"]
html_show_copyright = False
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}  # 100 columns at a width of 900

default_role = "code"  # docstrings quote names by single backticks
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_custom_sections = [("Arguments", "params_style"), "Communicates", "Communication", "Cost"]
myst_heading_anchors = 4


def _skip(app, what, name, value, skip, options) -> bool | None:
    """Methods that DTensor takes over from torch.Tensor are documented by torch."""
    documented = getattr(value, "__doc__", None)
    return True if documented and documented == getattr(getattr(torch.Tensor, name, None), "__doc__", None) else None


def setup(app) -> None:
    app.connect("autodoc-skip-member", _skip)
