"""Copies `triton_kernels/` into the layout that the Hugging Face `kernels` library loads, on this machine or the Hub.

    python -m hf_speculate.tools.hub.kernel_repository

writes `build/torch-universal/`; then `kernels.get_local_kernel(Path("."))` loads it, from the repository's root.
"""

import argparse
import configparser
import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "triton_kernels"
VARIANT = "torch-universal"  # the sources serve every torch build, GPU and CPU
NAME = "hf-speculate-kernels"
PACKAGE = NAME.replace("-", "_")


def write_repository(folder: Path) -> Path:
    """Write the variant into `folder`, in place of one that lies there.

    Args:
        folder: the repository's `build` folder; made where there is none.

    Returns:
        The variant's folder, which holds the package and what the library reads of it.
    """
    variant = folder / VARIANT
    if variant.exists():
        shutil.rmtree(variant)
    shutil.copytree(SOURCE, variant / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]"))
    (variant / "metadata.json").write_text(json.dumps(metadata(variant), indent=2) + "\n", encoding="utf-8")
    return variant


def metadata(variant: Path) -> dict[str, object]:
    """What the library reads before it imports anything: every key is required there."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    version = setup["metadata"]["version"]
    return {
        "id": f"{PACKAGE}_{digest(variant)}",  # the module's name: other sources in one process get another
        "name": NAME,
        "version": int(version.split(".")[0]),
        "license": setup["metadata"]["license"],
        "python-depends": [],
        "backend": {"type": "cuda"},  # the library knows none for all; it compares no device with it
    }


def digest(variant: Path) -> str:
    """Of names and contents of the package's files."""
    sha = hashlib.sha256()
    for path in sorted((variant / PACKAGE).rglob("*.py")):
        sha.update(f"{path.relative_to(variant).as_posix()}\n".encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()[:12]


def main() -> None:
    """Write the repository where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where torch-universal/ is written")
    sys.stdout.write(f"written: {write_repository(parser.parse_args().folder)}\n")


if __name__ == "__main__":
    main()
