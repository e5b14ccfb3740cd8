"""One HTML page made of blocks, which needs nothing else, and its figures and data as files."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.files import write_atomically
from fedlens.report.artists import Artists, Drawing, save_all
from fedlens.report.blocks import Block, Curves, Facts, Table, Text
from fedlens.report.numbers import LARGE, Cell, format_number
from fedlens.report.pictures import FORMATS, is_drawn, places
from fedlens.runs.records import is_number

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

STATES = ("finished", "diverged", "invalid", "stopped", "interrupted", "running", "failed")
OWN_NAME = re.compile("[a-z0-9_]+")  # of a figure: see `Block.slug`
LONG = 6  # blocks of a page that has a list of its contents
CROWDED = 8  # lines: from more than these on, a chart has the whole width
MOST_ROWS = 100_000  # of the data behind curves in a page; a file beside it has all
MOST_BYTES = 5_000_000  # of the data behind another block, which are else in that file alone
NUMBER = re.compile(r"[+-]?\d[\d.,]*(e[+-]?\d+)?%?( ± \d[\d.,]*%?)?")  # as tables have them
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shown:
    """A block as a page has it."""

    block: Block
    slug: str
    alt: str
    csv: str  # a data: address, or a file beside the page
    svg: str = ""
    chart: str = ""  # JSON, for the script
    wide: bool = False  # over the whole width, rather than beside another
    cells: Sequence[Sequence[str]] = ()
    classes: Sequence[str] = ()


def render_page(
    title: str,
    summary: str,
    blocks: Sequence[Block],
    out: str | Path,
    watch: Drawing | None = None,
    artists: Artists | None = None,
) -> Path:
    """Write the page of `blocks` to `out`/report.html, and return its path.

    Its figures go to `out`/figures, as PNG, SVG and PDF, with the data behind each as csv; those
    of an earlier page go. `watch` is called with the figures drawn and the figures in all; they are
    drawn by other processes, the `artists`, or else here.
    """
    out, name = Path(out), "report.html"
    blocks = distinct(blocks)
    drawn = [block for block in blocks if is_drawn(block)]
    try:
        earlier = _files_of(out / name)
        pictures = save_all(drawn, out / "figures", artists, watch)
        for one in blocks:
            if not isinstance(one, Text):
                write_atomically(out / "figures" / f"{one.slug}.csv", csv_of(one))
        page = html(title, summary, blocks, lambda block: pictures[block.slug])
        write_atomically(out / name, page.encode(errors="backslashreplace"))
        if not (out / "figures").is_symlink():  # else they lie in a folder of somebody's own
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
    live: bool = False,
) -> str:
    """The page itself. `picture` gives the SVG of a block that is drawn; a live page is renewed."""
    sections: list[dict[str, Any]] = []
    for block in blocks:
        shown = _shown(block, picture(block) if is_drawn(block) else "", live)
        if isinstance(block, Table):
            sections.append({"table": shown})
        elif isinstance(block, Facts):
            sections.append({"facts": shown})
        elif isinstance(block, Text):
            sections.append({"text": shown})
        elif sections and "figures" in sections[-1]:
            sections[-1]["figures"].append(shown)
        else:
            sections.append({"figures": [shown]})
    leads = True
    for section in sections:
        if "figures" in section:
            section["figures"] = _arranged(section["figures"], leads)
            leads = False
    script = (HERE / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        title=title,
        summary=summary,
        sections=[{"figures": None, "table": None, "facts": None, **one} for one in sections],
        contents=_contents(blocks),
        files=[block.slug for block in blocks if not isinstance(block, Text)],
        style=(HERE / "page.css").read_text("utf-8"),
        script=script,
        script_hash=digest,
        states=STATES,
        live=live,
    )


def _arranged(figures: Sequence[Shown], leads: bool) -> list[Shown]:
    """Figures two by two; what leads the page, has many lines or finds no partner is wide."""
    wide = [(leads and i == 0) or _is_crowded(one.block) for i, one in enumerate(figures)]
    waits = None  # the first of a pair
    for i in range(len(figures)):
        if waits is None or wide[i]:
            if waits is not None:
                wide[waits] = True
            waits = None if wide[i] else i
        else:
            waits = None
    if waits is not None:
        wide[waits] = True
    return [replace(one, wide=is_wide) for one, is_wide in zip(figures, wide, strict=True)]


def _is_crowded(block: Block) -> bool:
    return isinstance(block, Curves) and len({line.name for line in block.lines}) > CROWDED


def _contents(blocks: Sequence[Block]) -> list[tuple[str, str]]:
    """Where to go on a long page: the address and the title of what is not folded away."""
    found = [
        (one.slug, one.title)
        for one in blocks
        if not (isinstance(one, Text | Table) and one.folded)
    ]
    return found if len(found) >= LONG else []


@cache
def _template() -> Template:
    """Read once: a live page is made again and again."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html.jinja")


def _breakable(text: str) -> Markup:
    """A name that goes on in the next line where a person would: `partition.` and `alpha`.

    A number stays with what it is of: `lr=0.03,` and `seed=0`.
    """
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([.,=_/])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def distinct(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks, each with a file name of its own."""
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
    writer.writerow(map(_inert, header))
    writer.writerows([map(_inert, row) for row in rows])
    return file.getvalue().encode(errors="backslashreplace")  # halves of characters, too


def _inert(cell: Cell) -> Cell:
    """A cell that no spreadsheet takes for a formula: text that looks like one gets a quote."""
    if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell if NUMBER.fullmatch(cell) else f"'{cell}"
    return cell


def _shown(block: Block, svg: str, live: bool) -> Shown:
    thin = block.thinned() if isinstance(block, Curves) else block
    long = isinstance(block, Curves) and sum(len(line.x) for line in block.lines) > MOST_ROWS
    data = csv_of(thin if long else block)
    address = f"data:text/csv;base64,{base64.b64encode(data).decode()}"
    if len(data) > MOST_BYTES and not live:  # no file lies beside a live page
        address = f"figures/{block.slug}.csv"
    block = _told_of_bands(thin)
    shown = Shown(block, block.slug, block.alt or block.words(), address, svg)
    if isinstance(block, Curves):
        return replace(shown, chart=_chart(block))
    if isinstance(block, Table):
        cells = [[format_number(cell) for cell in row] for row in block.rows]
        return replace(shown, cells=cells, classes=_classes(block, cells))
    return shown


def _told_of_bands(block: Block) -> Block:
    """Where there are too many bands to draw, the page draws that of the name pointed at."""
    if not isinstance(block, Curves):
        return block
    if len({line.name for line in block.lines}) <= block.most_bands:
        return block
    if not any(line.low for line in block.lines):
        return block
    return replace(block, caption=f"{block.caption} Point at a name to see its band.")


def _classes(block: Table, cells: Sequence[Sequence[str]]) -> list[str]:
    """How each column of a table looks: words to the left, numbers to the right."""
    number = re.compile(r"(\d|[–+−<-]|[.,%±()\s]|e|of|to|or|never)*")
    found = []
    for column in range(len(block.header)):
        wordy = column == 0 or not all(number.fullmatch(row[column]) for row in cells)
        kinds = (("words", wordy), ("published", column in block.published))
        found.append(" ".join(kind for kind, applies in kinds if applies))
    return found


def _chart(block: Curves) -> str:
    """What the script needs to draw curves, as JSON that may stand inside HTML."""
    place = places(block.lines)
    lines = []
    for line in block.lines:
        lines.append(
            {
                "name": line.name,
                "place": place[line.name],
                "x": list(line.x),
                "y": _plain(line.y),
                "low": _plain(line.low),
                "high": _plain(line.high),
                "style": line.style,
                "note": line.note,
                "ring": line.ring,
                "off": line.off,
            }
        )
    chart = {
        "title": block.title,
        "lines": lines,
        "x_label": block.x_label,
        "percent": block.percent,
        "log_x": block.log_x,
        "log_y": block.log_y,
        "styles": dict(block.styles),
        "levels": list(block.levels),
        "most_bands": block.most_bands,
    }
    text = json.dumps(chart, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _plain(values: Sequence[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [_rounded(y) if is_number(y) else None for y in values]


def _rounded(y: float) -> float:
    # Of accuracies and losses more is not seen; of large numbers all that the page writes.
    return float(f"{y:.{6 if abs(y) < LARGE else 12}g}")


def _files_of(page: Path) -> set[str]:
    """The figures that a page of an earlier time wrote, as far as such a page may name them."""
    if not page.is_file():
        return set()
    found = re.search(r'<body data-files="([^"]*)"', page.read_text("utf-8", errors="replace"))
    return {name for name in (found[1].split() if found else ()) if OWN_NAME.fullmatch(name)}
