"""Records of runs become figures, a table and one HTML page. Nothing here trains."""

from __future__ import annotations

from fedlens.report.page import report
from fedlens.report.records import Run, read, read_all, rows, table

__all__ = ["Run", "read", "read_all", "report", "rows", "table"]
