"""`hf-speculate doctor`: examines the devices, so that "auto" knows what is right on them."""

import json

from hf_speculate.tools.cli.console import OK, REFUSED, answer, note, write_json
from hf_speculate.tools.cli.options import Doctor
from hf_speculate.tools.doctor.examination import examine


def run(options: Doctor) -> int:
    report = examine(compiles=options.compile, say=note)
    answer(json.dumps(report.as_dict(), indent=2) if options.as_json else str(report))
    if options.output is not None:
        write_json(options.output, report.as_dict())
    return OK if report.ok else REFUSED
