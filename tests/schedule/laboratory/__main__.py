"""Measure the adaptive schedule in all cells, print a table and write the results.

python -m tests.schedule.laboratory [--lookup FILE] [--pair FILE] [--head FILE] [--out FILE]
    [--noise 5%+pauses 20%+pauses] [--seeds 5] [--tokens 64 128] [--only TEXT] [--scenes]
    [--reference FILE]
"""

import argparse
import json
from pathlib import Path

from tests.schedule.laboratory.cells import main_cells, measure, read_traces, scenes
from tests.schedule.laboratory.machines import NOISES
from tests.schedule.laboratory.table import table, worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Replay recorded texts under the adaptive schedule."
    )
    parser.add_argument("--lookup", type=Path, help="texts of prompt lookup, as lookup.json")
    parser.add_argument("--pair", type=Path, help="guesses of a draft model, as pair.json")
    parser.add_argument(
        "--head", type=Path, help="texts with the runs of a head, as record.py writes them"
    )
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument(
        "--reference", type=Path, help="earlier results: only the schedule is run again"
    )
    parser.add_argument("--noise", nargs="+", choices=NOISES, default=["5%+pauses"])
    parser.add_argument("--seeds", type=int, default=1, help="processes of each cell")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--only", default="", help="part of the names of the cells to run")
    parser.add_argument(
        "--scenes", action="store_true", help="run the scenes in place of the main cells"
    )
    parser.add_argument("--cells", action="store_true", help="print every cell")
    args = parser.parse_args()
    traces = read_traces(args.lookup, args.pair, args.head)
    if args.scenes:
        cells = list(scenes(traces))
    else:
        cells = [cell for num_tokens in args.tokens for cell in main_cells(traces, num_tokens)]
    known = {}
    if args.reference and args.reference.exists():
        known = {row["cell"]: row for row in json.loads(args.reference.read_text())}
    rows = []
    for cell in cells:
        if args.only not in cell.name:
            continue
        for noise in args.noise:
            known[cell.name] = measure(cell, noise, range(args.seeds), known.get(cell.name))
            rows.append(known[cell.name])
            if args.cells:
                print(
                    f"{cell.name}, {noise}: best {rows[-1]['best']:.3f}, ours {rows[-1]['ours']}",
                    flush=True,
                )
        if args.out:
            args.out.write_text(json.dumps(rows))
    print(table(rows), worst(rows), sep="\n\n")


if __name__ == "__main__":
    main()
