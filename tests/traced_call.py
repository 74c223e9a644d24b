"""One plain greedy call with a tiny draft model, traced: the files of the library that it runs and loads.

`python -m tests.traced_call` prints JSON, "run" and "loaded": file below `hf_speculate` -> number of its lines. A file
is run if one of its functions is called between the start and the end of `generate()`. The kernels, which are a package
of their own, and the `__init__` of packages are left out.
"""

import json
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED  # set in the code of functions, and not of modules and classes
from pathlib import Path

import torch

import hf_speculate
from tests.tiny import make_model

LIBRARY = Path(hf_speculate.__file__).parent
PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # of the function or module around them


@contextmanager
def called_files() -> Iterator[set[str]]:
    """The files whose functions are called, in any thread."""
    files = set()

    def record(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_flags & CO_OPTIMIZED and code.co_name not in PARTS:
            files.add(frame.f_code.co_filename)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def num_lines(files: Iterable[str | None]) -> dict[str, int]:
    """The files of the library among `files`, with the number of their lines."""
    paths = sorted(Path(file) for file in files if file is not None)
    own = [path for path in paths if path.is_relative_to(LIBRARY) and path.name != "__init__.py"]
    names = {path.relative_to(LIBRARY).as_posix(): path for path in own}
    return {
        name: len(path.read_text(encoding="utf-8").splitlines())
        for name, path in names.items()
        if not name.startswith("triton_kernels/")
    }


def main() -> None:
    target = hf_speculate.enable(make_model("llama", num_hidden_layers=8))
    draft = make_model("llama", num_hidden_layers=1)  # so small that the adaptive schedule drafts in the first round
    prompt, stats = torch.tensor([[5, 6, 7, 8]]), hf_speculate.SpeculationStats()
    with called_files() as called:
        target.generate(prompt, assistant_model=draft, do_sample=False, max_new_tokens=16, speculation_stats=stats)
    assert stats.num_drafted
    loaded = [getattr(module, "__file__", None) for module in sys.modules.values()]
    print(json.dumps({"run": num_lines(called), "loaded": num_lines(loaded)}))


if __name__ == "__main__":
    main()
