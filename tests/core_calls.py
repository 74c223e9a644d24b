"""Decode with copies of the library that lack all options, or one option each.

`python -m tests.core_calls FOLDER` creates the copies in `FOLDER` from links and decodes with each
copy in a separate process. It fails if a text differs from plain decoding, or if the library needs
a file that was left out.
"""

import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.missing_options import hide
from tests.support.tiny import make_model, noisy_copy, ragged_prompts

ROOT = Path(__file__).resolve().parents[1]
LIBRARY, OPTIONS = ROOT / "hf_speculate", "options"
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 0}
# Draft source and settings of each call. Its text is compared if plain decoding gives the same
# text.
CALLS = (
    ("model", GREEDY),
    (
        "model",
        {**GREEDY, "num_assistant_tokens": 3, "speculation_cache": "dynamic", "eos_token_id": 7},
    ),
    (
        "model",
        {
            **GREEDY,
            "repetition_penalty": 1.3,
            "return_dict_in_generate": True,
            "output_scores": True,
        },
    ),
    ("lookup", {**GREEDY, "speculation_cache": "preallocated"}),
    ("custom", {**GREEDY, "num_assistant_tokens_schedule": "heuristic"}),
    *(
        ("model", {**SAMPLED, "verifier": verifier})
        for verifier in ("rejection", "block", "coupled", "typical")
    ),
)


def copy_without(options: Iterable[str], folder: Path) -> None:
    """Copy the library into `folder` without the given options."""
    for source, left_out in ((LIBRARY, {OPTIONS}), (LIBRARY / OPTIONS, set(options))):
        target = folder / source.relative_to(ROOT)
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name not in left_out:
                (target / entry.name).symlink_to(entry)


def decode(
    folder: Path,
    left_out: Sequence[str],
    target: PreTrainedModel,
    draft: PreTrainedModel,
    batch_sizes: Sequence[int],
) -> None:
    """Decode every call with the copy in `folder`, which lacks the options `left_out`."""
    sys.path.insert(0, str(folder))
    hide(left_out)
    import hf_speculate  # imported only after the copy is on the path
    from hf_speculate.models.foreign_code import KNOWN_PACKAGES
    from hf_speculate.types import DraftOut

    KNOWN_PACKAGES.add("tests")  # the models have hooks that the tests installed
    assert Path(hf_speculate.__file__).is_relative_to(folder)

    class Repeats:
        """Propose the newest token again."""

        def __init__(self, setup):
            self.setup = setup

        def draft(self, request):
            token_ids = request.query_token_ids[:, -1:].repeat(1, request.num_draft_tokens)
            lens = torch.full((len(token_ids),), request.num_draft_tokens, dtype=torch.int32)
            return DraftOut(token_ids, lens, None, None)

        def rows(self, indices):
            return

    sources = {
        "model": {"assistant_model": draft},
        "lookup": {"prompt_lookup_num_tokens": 4},
        "custom": {"drafter": Repeats},
    }
    for source, settings in CALLS:
        for batch_size in batch_sizes:
            stats = hf_speculate.SpeculationStats()
            call = {**ragged_prompts(batch_size, seed=1), "max_new_tokens": 12}
            ours = hf_speculate.generate(
                target, **call, **sources[source], **settings, speculation_stats=stats
            )
            assert stats.num_rounds, (source, settings)
            if settings["do_sample"]:
                continue
            own = ("num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_cache")
            plain = target.generate(
                **call, **{name: value for name, value in settings.items() if name not in own}
            )
            ids = [
                output if isinstance(output, torch.Tensor) else output.sequences
                for output in (ours, plain)
            ]
            assert torch.equal(*ids), (source, settings, batch_size)


def run(*arguments: Any) -> int | None:
    """Run `decode` in a new process and return its exit status."""
    process = multiprocessing.get_context("fork").Process(target=decode, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def main() -> None:
    torch.set_num_threads(1)  # a forked process has no other threads
    folder = Path(sys.argv[1]).absolute()
    target = make_model("llama", num_hidden_layers=2).double()
    draft = noisy_copy(target)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_speculate"]:
        del sys.modules[name]  # import the copy instead of the loaded library
    options = sorted(
        path.name for path in (LIBRARY / OPTIONS).iterdir() if (path / "__init__.py").is_file()
    )
    copies = {"all": options, **{option: [option] for option in options}}
    failed = []
    for name, left_out in copies.items():
        copy_without(left_out, folder / name)
        if run(folder / name, left_out, target, draft, (1, 3) if name == "all" else (2,)):
            failed.append(name)
    print(f"{len(copies)} copies, {len(failed)} failed: {' '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
