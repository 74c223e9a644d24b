"""Decodes a data set with a model that is loaded already."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_speculate.engine.distributed import synced_ranks
from hf_speculate.errors import ConfigError, UnsupportedModelError
from hf_speculate.tools.dataset.encoding import batches_of
from hf_speculate.tools.dataset.ranks import Ranks, find_ranks
from hf_speculate.tools.dataset.row_decoder import RowDecoder
from hf_speculate.tools.dataset.rows import Row, read_rows
from hf_speculate.tools.dataset.run import DatasetReport, Job, in_this_process, run


def decode_dataset(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Path | Iterable[str | Mapping[str, Any]],
    output: str | Path,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    seed: int | None = None,
    is_chat: bool = False,
    is_ordered: bool = False,
    if_changed: str = "refuse",
    on_batch: Callable[[DatasetReport], None] | None = None,
    **arguments: Any,
) -> DatasetReport:
    """Decode prompts in batches into a file with one JSON object a line, and go on where an earlier call was ended.

    Batches hold prompts of like length, the longest first. Each is on the disk before the next begins: a process that
    is killed loses the batch that runs. A line has "id", "text" (what is new), "num_tokens", "finish_reason" ("stop" or
    "length") and the prompt's other fields. `<output>.run` is a folder with what a later call needs.

    Where `accelerate launch` or `torchrun` has started several processes, each decodes its share with a model of its
    own; all of them must call this with the same arguments and share the folder of the output.

    Args:
        model: the target, enabled or not.
        tokenizer: the target's; left as it is.
        prompts: a file with a JSON value a line, or such values: strings, or objects with "prompt", "text", "messages"
            or "turns" (of which the first counts), and perhaps with "id", else the line's number is the id.
        output: the file; made where there is none, and only added to.
        max_new_tokens: of each row.
        batch_size: rows of a batch at most.
        seed: where tokens are drawn, each row's own seed follows from this one and from its id; None: drawn once, and
            kept for later calls.
        is_chat: put texts through the tokenizer's chat template too, as messages always are.
        is_ordered: bring the finished output into the order of the prompts.
        if_changed: what becomes of finished rows where prompts or settings are others than in the call before:
            "refuse", "keep" or "restart".
        on_batch: is called after each batch with how far this process is.
        **arguments: of `generate()`, such as `assistant_model`.

    Returns:
        How it went, on all processes; `.results()` reads the output.

    Raises:
        ConfigError: a prompt is none, ids repeat, the output was begun with something else, or a setting is wrong.
        UnsupportedModelError: there are several processes, and the model is spread over them.
    """
    rows = read_rows(prompts)
    check_batch_size(batch_size)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"seed must be an int, got {seed!r}; leave it out to have one drawn")
    decoder = RowDecoder(model, tokenizer, max_new_tokens, arguments, is_chat)
    ranks = find_ranks(is_cpu=model.device.type == "cpu")
    check_model(model, ranks)
    settings = {"target": _described(model), "max_new_tokens": max_new_tokens, "is_chat": is_chat}
    settings |= {name: _described(value) for name, value in arguments.items()}
    job = Job(rows, Path(output), settings, seed, is_ordered, if_changed)

    def make_batches(left: Sequence[Row]) -> list[list[Row]]:
        return batches_of(left, batch_size, tokenizer, is_chat)

    return run(job, make_batches, in_this_process(lambda: decoder), ranks, on_batch)


def check_batch_size(batch_size: int) -> None:
    """Refuse a number of rows that is none.

    Raises:
        ConfigError: it is no int, or below 1.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}; leave it out for 16")


def check_model(model: PreTrainedModel, ranks: Ranks) -> None:
    """Refuse a model that ranks can only run together.

    Raises:
        UnsupportedModelError: there are several ranks, and the model is spread over them.
    """
    if ranks.num == 1:
        return
    if (getattr(model, "tp_size", None) or 1) > 1 or synced_ranks(None, [model], model.device) is not None:
        raise UnsupportedModelError(
            f"each of {ranks.num} ranks must hold a model of its own to decode a share of the rows, got one that is "
            "spread over them; call generate() on all ranks instead"
        )


def _described(value: Any) -> Any:
    """What a manifest says of an argument."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _described(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_described(inner) for inner in value]
    if isinstance(value, GenerationConfig):
        return value.to_diff_dict()
    config = getattr(value, "config", None)
    return getattr(config, "name_or_path", None) or type(value).__name__
