"""Pages that show what a benchmark measured."""

from hf_speculate.report.page import write_html

__all__ = ["write_html"]
