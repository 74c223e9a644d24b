"""Complete the metadata of setup.cfg for a package index.

An index displays README.md outside its repository. If `REPOSITORY_URL` is set, the links in
README.md point to the files of the released tag in the repository, and the index lists the
repository. Otherwise, nothing changes.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def index_metadata(url: str) -> dict[str, object]:
    """Return a description with absolute links, and the links that an index lists beside it.

    Args:
        url: web address of the repository, without a slash at its end.
    """
    package = (ROOT / "hf_speculate" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"', package, re.M)
    files, raw_files = f"{url}/blob/v{version}/", f"{url}/raw/v{version}/"
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r"(?<=\]\()(?![a-z]+:|#)", files, text)
    text = re.sub(r'(?<=\bsrc=")(?![a-z]+:)|(?<=\bsrcset=")(?![a-z]+:)', raw_files, text)
    return {
        "long_description": text,
        "project_urls": {
            "Source": url,
            "Documentation": f"{files}docs/index.md",
            "Changelog": f"{files}CHANGELOG.md",
            "Issues": f"{url}/issues",
        },
    }


repository_url = os.environ.get("REPOSITORY_URL", "").removesuffix("/")
setup(**index_metadata(repository_url) if repository_url else {})
