"""A self-contained HTML page made of blocks, and its figures and data as separate files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedlens.report.blocks import FORMATS, Block, Curves, Facts, Table, Text, is_drawn, places
from fedlens.report.numbers import LARGE, Cell, format_number
from fedlens.report.palette import CSS, in_page, marker_of, strokes
from fedlens.runs.progress import counted, shown
from fedlens.runs.records import is_number
from fedlens.storage.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

STATES = ("finished", "diverged", "invalid", "stopped", "interrupted", "running", "failed")
OWN_NAME = re.compile("[a-z0-9_]+")  # a file name that `Block.slug` can produce
LONG = 6  # a page with at least this many visible blocks has a table of contents
CROWDED = 8  # a chart with more lines than this takes the whole width
MOST_ROWS = 100_000  # curves with more rows are thinned in the embedded csv; the csv file has all
MOST_BYTES = 5_000_000  # a larger csv is not embedded in the page: the page links to the file
NUMBER = re.compile(r"[+-]?\d[\d.,]*(e[+-]?\d+)?%?( ± \d[\d.,]*%?)?")  # as written in tables
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shown:
    """A block with everything that the page template needs to show it."""

    block: Block
    csv: str  # a data: URL, or the path of a file next to the page
    svg: str = ""
    chart: str = ""  # JSON for page.js
    wide: bool = False  # takes the whole width, not half of it
    cells: Sequence[Sequence[str]] = ()
    classes: Sequence[str] = ()


def render_page(
    title: str,
    summary: str,
    blocks: Sequence[Block],
    out: str | Path,
    progress: bool = False,
) -> Path:
    """Write the page of `blocks` to `out`/report.html, and return its path.

    Its figures go to `out`/figures, as PNG, SVG and PDF, with the data of each as csv. Figures of
    an earlier page in `out` are deleted. With `progress`, it is shown how many are drawn.
    """
    from fedlens.report import draw  # imports matplotlib, which takes a while

    out, name = Path(out), "report.html"
    blocks = distinct(blocks)
    drawn = [block for block in blocks if is_drawn(block)]
    try:
        earlier = _files_of(out / name)
        pictures: dict[str, str] = {}
        with shown(progress, counted, "figures") as watch:
            for block in drawn:
                pictures[block.slug] = draw.save(block, out / "figures")
                if watch is not None:
                    watch(len(pictures), len(drawn))
        for one in blocks:
            if not isinstance(one, Text):
                write_atomically(out / "figures" / f"{one.slug}.csv", csv_of(one))
        page = html(title, summary, blocks, lambda block: pictures[block.slug])
        write_atomically(out / name, page.encode(errors="backslashreplace"))
        if not (out / "figures").is_symlink():  # never delete files in a folder elsewhere
            for slug in earlier - {block.slug for block in blocks}:
                for kind in (*FORMATS, "csv"):
                    (out / "figures" / f"{slug}.{kind}").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"the report cannot be written to {out} ({error.strerror}): name another folder"
        ) from error
    return out / name


def html(
    title: str,
    summary: str,
    blocks: Sequence[Block],
    picture: Callable[[Any], str],
    live: Literal["", "yes", "ended"] = "",
) -> str:
    """The HTML of the page. `picture` returns the SVG of a drawn block.

    A live page has no files beside it, and reloads itself while runs go on ("yes").
    """
    shown = [_shown(one, picture(one) if is_drawn(one) else "", bool(live)) for one in blocks]
    lead = next((one for one in shown if _kind(one.block) == "figures"), None)
    sections = [
        (kind, _in_pairs([*some], lead) if kind == "figures" else [*some])
        for kind, some in groupby(shown, key=lambda one: _kind(one.block))
    ]
    script = (HERE / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        title=title,
        summary=summary,
        sections=sections,
        contents=_contents(blocks),
        files=[block.slug for block in blocks if not isinstance(block, Text)],
        style=CSS,
        script=script,
        script_hash=digest,
        states=STATES,
        live=live,
    )


def _kind(block: Block) -> str:
    own = (kind.__name__.lower() for kind in (Table, Facts, Text) if isinstance(block, kind))
    return next(own, "figures")


def _in_pairs(figures: Sequence[Shown], lead: Shown | None) -> list[Shown]:
    """Arrange figures in pairs. The first of the page, crowded and unpaired ones are wide."""
    wide = [
        one is lead or (isinstance(one.block, Curves) and len(one.block.names()) > CROWDED)
        for one in figures
    ]
    for is_wide, some in groupby(range(len(figures)), key=list(wide).__getitem__):
        *others, last = some
        wide[last] = is_wide or not len(others) % 2
    return [replace(one, wide=is_wide) for one, is_wide in zip(figures, wide, strict=True)]


def _contents(blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """Table of contents of a long page: anchor and title of each block that is not folded."""
    found = [
        (one.slug, one.title)
        for one in blocks
        if not (isinstance(one, Text | Table) and one.folded)
    ]
    return found if len(found) >= LONG else []


@cache
def _template() -> Template:
    """The page template. Cached, since a live page is rendered many times."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["whole_options"] = _whole_options
    environment.filters["colour"] = in_page
    return environment.get_template("page.html.jinja")


def _whole_options(text: str) -> Markup:
    """A text in which no line ends within an option, as after the dashes of `--seeds`."""
    from markupsafe import Markup, escape

    option = r'<span class="option">\g<0></span>'
    return Markup(re.sub(r"(?<!\S)--[a-z][a-z-]*", option, str(escape(text))))


def _breakable(text: str) -> Markup:
    """A name with line breaks allowed between its words, as between `partition.` and `alpha`.

    There is no break before a digit: `lr=0.03,` and `seed=0` stay whole.
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([.,=_/])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def distinct(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks with unique file names."""
    seen: Counter[str] = Counter()
    named = []
    for block in blocks:
        slug = block.slug
        seen[slug] += 1
        named.append(replace(block, name=f"{slug}_{seen[slug]}") if seen[slug] > 1 else block)
    return named


def csv_of(block: Block) -> bytes:
    """The data behind a block as a csv file."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    header, rows = block.sheet()
    writer.writerow(map(inert, header))
    writer.writerows([map(inert, row) for row in rows])
    return file.getvalue().encode(errors="backslashreplace")  # text may hold lone surrogates


def inert(cell: Cell) -> Cell:
    """The cell, with a quote in front if a spreadsheet would read its text as a formula."""
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell if NUMBER.fullmatch(cell) else f"'{cell}"
    return cell


def _shown(block: Block, svg: str, live: bool) -> Shown:
    thin = block.thinned() if isinstance(block, Curves) else block
    long = isinstance(block, Curves) and sum(len(line.x) for line in block.lines) > MOST_ROWS
    data = csv_of(thin if long else block)
    address = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    if len(data) > MOST_BYTES and not live:  # a live page has no files next to it
        address = f"figures/{block.slug}.csv"
    if isinstance(thin, Curves):
        if any(line.low for line in thin.lines) and not thin.banded:
            thin = replace(thin, caption=f"{thin.caption} Point at a name to see its band.")
        return Shown(thin, address, svg, chart=_chart(thin))
    if isinstance(block, Table):
        cells = [[format_number(cell) for cell in row] for row in block.rows]
        return Shown(block, address, cells=cells, classes=_classes(block, cells))
    return Shown(block, address, svg)


def _classes(block: Table, cells: Sequence[Sequence[str]]) -> list[str]:
    """The CSS classes of each column of a table: words align left, numbers right."""
    number = re.compile(r"(\d|[–+−<-]|[.,%±()\s]|e|of|to|or|never)*|diverged.*")
    found = []
    for column in range(len(block.header)):
        wordy = column == 0 or not all(number.fullmatch(row[column]) for row in cells)
        kinds = (("words", wordy), ("published", column in block.published))
        found.append(" ".join(kind for kind, applies in kinds if applies))
    return found


def _chart(block: Curves) -> str:
    """What page.js needs to draw curves, as JSON that is safe inside HTML."""
    place = places(block.lines)
    lines: list[dict[str, Any]] = [
        {"name": line.name, "style": line.style, "ring": line.ring, "x": list(line.x)}
        | {key: _plain(getattr(line, key)) for key in ("y", "low", "high")}
        | _drawn_with(place[line.name])
        for line in block.lines
    ]
    plain = ("x_label", "percent", "log_x", "log_y", "banded", "whole", "ticks")
    chart = {key: getattr(block, key) for key in plain} | {
        "span": None if block.log_x else block.span(),
        "lines": lines,
        "names": [vars(name) | _drawn_with(name.place) for name in block.names()],
        "styles": dict(block.styles),
        "levels": list(block.levels),
        "keys": block.meanings(),
        "strokes": strokes(),
    }
    text = json.dumps(chart, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _drawn_with(place: int) -> dict[str, Any]:
    return {"place": place, "colour": in_page(place), "marker": marker_of(place)}


def _plain(values: Sequence[float | None] | None) -> list[float | None] | None:
    # 6 digits are all one sees of accuracies and losses; the page writes large numbers in full.
    return (
        None
        if values is None
        else [
            float(f"{y:.{6 if abs(y) < LARGE else 12}g}") if is_number(y) else None for y in values
        ]
    )


def _files_of(page: Path) -> set[str]:
    """The slugs of the figures that an earlier page lists; names that are no slugs are ignored."""
    if not page.is_file():
        return set()
    found = re.search(r'<body data-files="([^"]*)"', page.read_text("utf-8", errors="replace"))
    return {name for name in (found[1].split() if found else ()) if OWN_NAME.fullmatch(name)}
