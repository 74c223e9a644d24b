"""Write `hf_speculate/kernels/` as a repository for Hugging Face's `kernels` library.

    python -m hf_speculate.tools.hub.kernel_repository

The command writes `build/torch-universal/`. In the root of a clone,
`kernels.get_local_kernel(Path("."))` loads the kernels.
"""

import argparse
import configparser
import hashlib
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "hf_speculate" / "kernels"
VARIANT = "torch-universal"  # works with every torch build, with or without a GPU
NAME = "hf-speculate-kernels"
PACKAGE = NAME.replace("-", "_")


def write_repository(folder: Path) -> Path:
    """Write the variant into the repository's `build` folder; return the variant's folder."""
    variant = folder / VARIANT
    if variant.exists():
        shutil.rmtree(variant)
    shutil.copytree(
        SOURCE, variant / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.py[cod]")
    )
    (variant / "metadata.json").write_text(
        json.dumps(metadata(variant), indent=2) + "\n", encoding="utf-8"
    )
    return variant


def metadata(variant: Path) -> dict[str, object]:
    """Return the metadata of a variant; the library requires every key."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return {
        "id": f"{PACKAGE}_{digest(variant)}",  # name of the module within a process
        "name": NAME,
        "version": int(version("hf-speculate").split(".")[0]),
        "license": setup["metadata"]["license_expression"],
        "python-depends": [],
        "backend": {"type": "cuda"},  # required, but not compared with the device
    }


def digest(variant: Path) -> str:
    """Compute a digest of the names and contents of the package's files."""
    sha = hashlib.sha256()
    for path in sorted((variant / PACKAGE).rglob("*.py")):
        sha.update(f"{path.relative_to(variant).as_posix()}\n".encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build", help="where torch-universal/ is written"
    )
    sys.stdout.write(f"written: {write_repository(parser.parse_args().folder)}\n")


if __name__ == "__main__":
    main()
