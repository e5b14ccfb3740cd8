"""How the documentation becomes a site: `make docs`, offline."""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

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
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", bring_along, priority=400)  # before Sphinx lists what it copies


def bring_along(app: Sphinx, tree: nodes.document) -> None:
    """A file of the repository that a page links to goes with the site; a folder is only named.

    So links work wherever the site is put. Those that lead nowhere stay, and the build fails.
    """
    docs = Path(app.srcdir)
    for link in list(tree.findall(addnodes.pending_xref)):
        name = link["reftarget"]
        if "/" not in name:  # a page, or a place in one
            continue
        name += ".md" if link["refdomain"] == "doc" else ""  # Sphinx takes it for a page
        # What index.md includes of README.md names files from where that stands.
        found = [path for base in (docs, docs.parent) if (path := (base / name).resolve()).exists()]
        if found and found[0].is_file():
            target = found[0].relative_to(docs.parent)
            copied = addnodes.download_reference("", "", *link.children, reftarget=f"../{target}")
            link.replace_self(copied)
        elif found:
            link.replace_self(link.children)
