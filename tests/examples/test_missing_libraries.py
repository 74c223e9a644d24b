"""Scripts that need an extra say so, in one line, where its library is not installed."""

import re
import runpy
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# The first that each imports.
LIBRARIES = {"grammar.py": "xgrammar", "prometheus.py": "prometheus_client"}


def extras_of_the_page() -> dict[str, str]:
    """The extra of each row of the table, "-" where there is none."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    return {name: extra.strip("`") for name, extra in re.findall(r"^\| `([^`]+)` \| (\S+) \|", page, re.M)}


@pytest.mark.parametrize(("script", "library"), LIBRARIES.items())
def test_a_missing_library_is_named_with_the_extra_of_the_page(script, library, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setitem(sys.modules, library, None)  # an import of it fails
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    extra = extras_of_the_page()[script]
    assert raised.value.code == f'{library} is not installed; run: pip install ".[{extra}]"'


def test_extras_of_the_page_are_those_of_the_package():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = extras_of_the_page()
    assert {path.name for path in EXAMPLES.glob("*.py")} <= set(extras)
    assert set(extras.values()) - {"-"} <= set(config["options.extras_require"])
