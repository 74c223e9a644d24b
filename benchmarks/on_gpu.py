"""Checks and measurements on a CUDA device.

    python benchmarks/on_gpu.py --first-light --out FOLDER  # what decides most, in six minutes; ends with a table
    python benchmarks/on_gpu.py --part 1 --out FOLDER       # one of six parts of at most eight minutes
    python benchmarks/on_gpu.py --first-light --out FOLDER --dry-run  # tiny models on a simulated device, no figures

First light runs, in this order: the kernels against their references, texts in half precision and the tests that need a
GPU; an 8B target with a 1B draft whose acceptance an oracle fixes, compiled methods last; waits and launches of a
round; times of the kernels and of their references; further tests of the kernels. `FOLDER` gets a JSON file for each
part, `first_light.log` and `summary.txt`.

Parts: 1 kernels, attention backends, copy rate and the tests that run on a GPU; 2 exactness in half precision, with
cuDNN attention allowed and not; 3 waits and launches of a round; 4 times of the kernels; 5 the 8B target with the 1B
draft; 6 seconds of compilation. `FOLDER/on_gpu_<part>.json` is written after every cell and check.

The exit status is 1 if a check failed or a part did not finish. No network is needed, and the library need not be
installed.
"""

import argparse
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import _first_light
from _gpu_report import Report, end_process_after, file_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NUM_PARTS = 6
LIMIT_S = 480.0  # of a part
DRY_FACTOR = 6.0  # how much longer parts and cells may take on a simulated device, whose kernels run in Python
# For the dry run: hides packages that the Python of a GPU machine may lack.
BARE = ROOT / "benchmarks" / "bare"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--first-light", action="store_true", help="what decides most, in six minutes")
    which.add_argument("--part", choices=[str(number + 1) for number in range(NUM_PARTS)])
    which.add_argument("--first-light-part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    names = [part.name for part in _first_light.PARTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=[], help="parts of first light that get all the time"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a simulated device")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part: begin no cell after this")
    parser.add_argument("--commit", default="", help="revision to name in the results, where git is not at hand")
    parser.add_argument("--began-at", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def environment_of(is_dry: bool) -> dict[str, str]:
    """Variables of the processes of first light."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    variables["TRITON_INTERPRET"] = "1" if is_dry else "0"  # Triton reads it when it is imported
    if is_dry:
        folders.insert(0, str(BARE))
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(folders)}


def run_part(args: argparse.Namespace) -> int:
    """Run one part in this process; 1 if a check failed."""
    name = args.first_light_part or f"on_gpu_{args.part}"

    def say(line: str) -> None:
        print(f"[{time.time() - args.began_at:6.1f} s] {line}", flush=True)

    def watch(seconds: float | None) -> None:
        factor = DRY_FACTOR if args.dry_run else 1.0
        if args.first_light_part:  # another process goes on behind the cell
            end_process_after(None if seconds is None else factor * seconds)

    if args.first_light_part:
        faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # if it is late, the log says where it was
    begin = time.monotonic()
    say(f"{name}: loads torch and transformers")
    parts = importlib.import_module("_gpu_parts")  # only here: the process that starts others needs none of it
    device = importlib.import_module("_gpu_dry" if args.dry_run else "_gpu_cuda").make()
    run = parts.FIRST_LIGHT[name] if args.first_light_part else parts.PARTS[args.part]
    with device:
        content = {"environment": parts.environment_of(args.commit), "part": name, "is_dry_run": args.dry_run}
        limit_s = args.limit_s - (time.monotonic() - begin)
        report = Report(
            file_of(args.out, name), content, limit_s, device.recover, watch, is_resumed=args.resume, say=say
        )
        run(report, device)
        report.finish()
    say(f"{name}: written to {report.path}; {report.num_failed} checks failed")
    return 1 if report.num_failed else 0


def main() -> None:
    args = parse()
    if args.first_light:
        options = ["--dry-run"] * args.dry_run + (["--commit", args.commit] if args.commit else [])
        parts = _first_light.chosen(args.only, DRY_FACTOR if args.dry_run else 1.0)
        sys.exit(_first_light.first_light(args.out, parts, options, environment_of(args.dry_run)))
    if args.dry_run and "TRITON_INTERPRET" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    try:
        status = run_part(args)
    except BaseException:  # noqa: BLE001, printed
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a device that failed, or what a compiler leaves running, may hold up an ordinary exit


if __name__ == "__main__":
    main()
