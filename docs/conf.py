"""Settings of Sphinx: `make docs` writes these pages to build/docs, without the network."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from cli_reference import reference  # noqa: E402

import hf_speculate  # noqa: E402  # the checkout, installed or not

project = "hf_speculate"
author = "The hf_speculate contributors"
version = release = hf_speculate.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]

# Markdown: links to `page.md#heading` are checked, down to the pages' deepest headings.
myst_heading_anchors = 3

# Docstrings write `code` in single backticks, and a paper as "Source:".
default_role = "literal"
smartquotes_action = "D"  # dashes only: values such as "auto" stay as typed
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Returns: Ids [B, K], ..." begins with words, not with a type
# Several names may share a line.
napoleon_custom_sections = ["Source", ("Attributes", "params_style")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# Every name in a signature must be found. These have no page here:
nitpicky = True
nitpick_ignore_regex = [
    # Other libraries, whose indexes a build without network cannot read.
    (
        r"py:.*",
        (
            r"(torch|transformers|huggingface_hub|pandas|matplotlib|rich|pathlib|collections|enum"
            r"|logging)\..*"
        ),
    ),
    (r"py:class", r"(Tensor|PreTrainedModel|PreTrainedTokenizerBase|GenerateOutput|HfApi|Path)"),
    # Names of signatures only: aliases, and internal objects of a round.
    (
        r"py:class",
        (
            r"(hf_speculate\.)?.*\b(AnyClass|ModelT|VerifierFactory|DrafterFactory|KVCache|KVState"
            r"|StageSeconds|TokenRows)"
        ),
    ),
]

html_theme = "furo"
html_title = f"hf_speculate {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False


def repository_url() -> str | None:
    """Return the web address of the repository: `REPOSITORY_URL`, or the clone's origin.

    None if it is no web address.
    """
    command = ["git", "remote", "get-url", "origin"]
    address = os.environ.get("REPOSITORY_URL")
    if not address:
        address = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    address = re.sub(r"^(?:ssh://)?[\w.-]+@([\w.-]+)[:/]", r"https://\1/", address)  # ssh
    parts = urlsplit(address.removesuffix(".git"))
    return f"https://{parts.hostname}{parts.path}" if parts.scheme in ("http", "https") else None


REPOSITORY = repository_url()
if REPOSITORY is not None:
    html_theme_options = {
        "source_repository": REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
        "footer_icons": [
            {"name": "Repository", "url": REPOSITORY, "html": "Repository", "class": ""}
        ],
    }

# Pages from elsewhere in the repository, by the name of their page here.
ELSEWHERE = {
    "project/examples": ROOT / "examples" / "README.md",
    "project/bundled-head": ROOT / "examples" / "heads" / "README.md",
    "project/smollm2-head": ROOT / "examples" / "smollm2_head" / "README.md",
    "project/results": ROOT / "benchmarks" / "RESULTS.md",
    "project/contributing": ROOT / "CONTRIBUTING.md",
    "project/changes": ROOT / "CHANGELOG.md",
}
SHOWN_AS = {path: DOCS / f"{name}.md" for name, path in ELSEWHERE.items()} | {
    ROOT / "README.md": DOCS / "index.md"
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def take_from_elsewhere(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show a page from elsewhere, and point every link of a page to its target's page here.

    The pages are written for code hosts, where the same links point to files.
    """
    here = DOCS / f"{docname}.md"
    if not here.is_file():
        return
    path = ELSEWHERE.get(docname, here)
    if path is not here:
        app.env.note_dependency(path)
        source[0] = path.read_text(encoding="utf-8")
    if docname == "cli":
        source[0] += "\n" + reference()
    if docname == "project/results":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n../results/*\n```\n"

    def moved(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        return Path(os.path.relpath(SHOWN_AS.get(target, target), here.parent)).as_posix()

    source[0] = LINK.sub(moved, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx, which calls this function."""
    app.connect("source-read", take_from_elsewhere)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
