"""Pages that show what a benchmark measured."""

from hf_speculate.tools.bench.report.page import write_html

__all__ = ["write_html"]
