"""`hf-speculate doctor`: check the devices of this machine."""

import json

from hf_speculate.tools.cli.console import OK, REFUSED, answer, note
from hf_speculate.tools.cli.options import Doctor
from hf_speculate.tools.doctor.report import examine


def run(options: Doctor) -> int:
    report = examine(say=note)
    answer(json.dumps(report.as_dict(), indent=2) if options.as_json else str(report))
    return OK if report.ok else REFUSED
