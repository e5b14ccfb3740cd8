"""How the documentation becomes a site: `make docs`, offline."""

from fedlens.version import __version__

project = "Fedlens"
copyright = "the Fedlens authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Fedlens {__version__}"
html_theme_options = {"footer_icons": []}
html_show_search_summary = (
    False  # it fetches pages, which browsers refuse where the site is opened from files
)
exclude_patterns = ["_build"]
myst_heading_anchors = 4
# Links out of docs/, into the repository, are those of the files as they lie there.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
