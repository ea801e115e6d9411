"""Sphinx's configuration, for tools/make_docs.py, which lays out the pages."""

project = "veScale"
author = "the veScale authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "veScale"

default_role = "code"  # docstrings quote names by single backticks
add_module_names = False
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_custom_sections = [("Arguments", "params_style"), "Communicates", "Communication", "Cost"]
myst_heading_anchors = 4


def _skip(app, what, name, value, skip, options) -> bool | None:
    """Methods that DTensor takes over from torch.Tensor are documented by torch."""
    return True if getattr(value, "__module__", None) == "vescale_dtensor._methods" else None


def setup(app) -> None:
    app.connect("autodoc-skip-member", _skip)
