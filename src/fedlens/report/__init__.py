"""Makes figures, tables and one HTML page of the records of runs. Nothing here trains."""

from __future__ import annotations

from fedlens.report.page import render_page
from fedlens.report.runs import report
from fedlens.report.tables import rows, table
from fedlens.runs.records import Run, read, read_all

__all__ = ["Run", "read", "read_all", "render_page", "report", "rows", "table"]
