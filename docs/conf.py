"""How the documentation becomes a site: `make docs`, offline."""

import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx import addnodes
from sphinx.application import Sphinx

from fedlens.version import __version__

DOCS = Path(__file__).parent
GALLERY = DOCS / "_gallery"  # tools/gallery.py writes it
sys.path.append(str(DOCS.parent / "tools"))

project = "Fedlens"
copyright = "the Fedlens authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Fedlens {__version__}"
html_use_index = False  # search finds names, and on a phone its columns do not fit
html_theme_options = {"footer_icons": []}
html_show_search_summary = (
    False  # it fetches pages, which browsers refuse where the site is opened from files
)
html_extra_path = ["_gallery"] if GALLERY.exists() else []
exclude_patterns = ["_build", "_gallery"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
default_role = "code"  # docstrings have code in single backticks


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", bring_along, priority=400)  # before Sphinx lists what it copies
    app.add_directive("fedlens-commands", Commands)
    app.add_directive("fedlens-gallery", Gallery)


def bring_along(app: Sphinx, tree: nodes.document) -> None:
    """A file of the repository that a page links to goes with the site; a folder is only named.

    So links work wherever the site is put. Those that lead nowhere stay, and the build fails.
    """
    docs = Path(app.srcdir)
    for image in tree.findall(nodes.image):  # README.md names those from where it stands
        image["uri"] = image["uri"].removeprefix("docs/")
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


class Commands(Directive):
    """Every command, with its own help."""

    def run(self) -> list[nodes.Node]:
        import typer

        from fedlens.cli.main import app_of

        command = typer.main.get_command(app_of())
        return self.sections(command, command.context_class(command, info_name="fedlens"))

    def sections(self, group, context) -> list[nodes.Node]:
        found = []
        for name, command in group.commands.items():
            own = type(context)(command, parent=context, info_name=name, terminal_width=90)
            title = own.command_path
            section = nodes.section(ids=[nodes.make_id(title)], names=[title])
            text = command.get_help(own)
            section += [nodes.title(text=title), nodes.literal_block(text, text, language="text")]
            section += self.sections(command, own) if hasattr(command, "commands") else []
            found.append(section)
        return found


class Gallery(Directive):
    """The pages that tools/gallery.py made: a figure of each, and the command that wrote it."""

    def run(self) -> list[nodes.Node]:
        from gallery import PAGES

        found = []
        for name, (title, command) in PAGES.items():
            command = f"fedlens {command}"
            section = nodes.section(ids=[name], names=[title])
            section += nodes.title(text=title)
            section += nodes.literal_block(command, command, language="sh")
            if (GALLERY / "gallery" / f"{name}.html").exists():
                link = nodes.reference("", "Open the page", refuri=f"gallery/{name}.html")
                section += nodes.image(uri=f"_gallery/gallery/{name}.png", width="460px")
                section += nodes.paragraph("", "", link)
            found.append(section)
        return found
