"""Decode batches of a data set on Ray Data actors."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hf_speculate.errors import ConfigError, SpeculateError, counted, import_extra
from hf_speculate.tools.dataset.row_decoder import Decoded, RowDecoder
from hf_speculate.tools.dataset.rows import Row

_UNITS = 10_000  # smallest units of a resource in Ray


def decode_on_ray(
    make_decoder: Callable[[], RowDecoder],
    batches: Sequence[Sequence[Row]],
    seed: int,
    *,
    workers: int | None = None,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float | None = None,
    ray_address: str | None = None,
    num_attempts: int = 3,
) -> Iterator[Decoded]:
    """Decode batches on actors; yield results as they arrive.

    Ray restarts a dead actor with its batch.

    Args:
        make_decoder: loads the models of an actor.
        batches: batches of rows with equal settings.
        seed: seed of the data set.
        workers: number of actors, each with its own models. None for one per GPU, or one if there
            are no GPUs.
        cpus_per_worker: CPUs reserved for each actor without a GPU, and its number of threads.
        gpus_per_worker: GPUs reserved for each actor. None for 1 if the cluster has GPUs, otherwise
            0.
        ray_address: address of the cluster. None for RAY_ADDRESS, a running local cluster, or a new
            cluster.
        num_attempts: maximum number of times that a batch is started.

    Raises:
        ConfigError: the cluster is too small or cannot be found, or a batch failed in an actor.
    """
    ray: Any = _connected(ray_address)
    resources, num_workers = resources_of(
        ray.cluster_resources(), workers, cpus_per_worker, gpus_per_worker
    )
    items = [{"rows": json.dumps([asdict(row) for row in batch])} for batch in batches]
    context = ray.data.DataContext.get_current()
    shows_progress, context.enable_progress_bars = context.enable_progress_bars, False
    try:  # the data set copies these settings
        dataset = ray.data.from_items(items, override_num_blocks=len(items))
    finally:
        context.enable_progress_bars = shows_progress
    decoded = dataset.map_batches(
        _Worker,
        fn_constructor_args=(make_decoder, seed, _counter(ray), num_attempts),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(num_workers, len(items))),
        **resources,
    )
    for block in decoded.iter_batches(batch_size=1, prefetch_batches=0, batch_format="numpy"):
        content = json.loads(str(block["decoded"][0]))
        if "problem" in content:
            raise ConfigError(content["problem"])
        yield Decoded(**content)


def _counter(ray: Any) -> Any:
    """Start an actor that counts the starts of each batch."""

    # a local class is pickled by value, so the actor's process does not import torch
    class Attempts:
        def __init__(self) -> None:
            self.counts: Counter[str] = Counter()

        def begin(self, key: str) -> int:
            self.counts[key] += 1
            return self.counts[key]

    return ray.remote(num_cpus=0)(Attempts).remote()


@dataclass
class _Worker:
    """The models of one actor.

    User errors are returned as text; other errors are raised in Ray.
    """

    make_decoder: Callable[[], RowDecoder]
    seed: int
    attempts: Any  # see `_counter`
    num_attempts: int

    @cached_property
    def decoder(self) -> RowDecoder:
        return self.make_decoder()

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        rows = [Row(**fields) for fields in json.loads(str(block["rows"][0]))]
        try:
            ray = import_extra("ray", "ray")
            if ray.get(self.attempts.begin.remote(rows[0].key)) > self.num_attempts:
                keys = ", ".join(row.key for row in rows[:3])
                raise ConfigError(
                    f"a batch must not kill its actor, got {counted(len(rows), 'row')} ({keys}) on "
                    "which "
                    f"{self.num_attempts} died; choose a smaller batch size, or remove these "
                    "prompts"
                )
            content = self.decoder.decode(rows, self.seed)._asdict()
        except (SpeculateError, OSError) as error:
            content = {"problem": str(error)}
        return {"decoded": [json.dumps(content)]}


def _connected(address: str | None) -> Any:
    """Connect Ray to a cluster, without usage reports; return the module."""
    ray = import_extra("ray", "ray")
    import_extra("ray.data", "ray")
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError as error:
            raise ConfigError(
                f"the address must be that of a running Ray cluster, got {address!r}; leave it out "
                "to start one here"
            ) from error
    return ray


def resources_of(
    cluster: Mapping[str, float],
    workers: int | None,
    cpus_per_worker: float,
    gpus_per_worker: float | None,
) -> tuple[dict[str, float], int]:
    """Choose each actor's resources and the number of actors.

    Raises:
        ConfigError: the actors do not fit into the cluster.
    """
    gpus = min(cluster.get("GPU", 0.0), 1.0) if gpus_per_worker is None else gpus_per_worker
    name, needed = ("GPU", gpus) if gpus else ("CPU", cpus_per_worker)
    available = cluster.get(name, 0.0)
    # Ray's integer units avoid rounding, since 1 / 0.2 in floating point is less than 5.
    num_units, worker_units = round(available * _UNITS), max(round(needed * _UNITS), 1)
    num_fitting = num_units // worker_units
    if gpus and worker_units < _UNITS:  # a fraction of a GPU never spans two GPUs
        num_fitting = (
            num_units // _UNITS * (_UNITS // worker_units) + num_units % _UNITS // worker_units
        )
    num_workers = workers or (max(num_fitting, 1) if gpus else 1)
    if needed and num_fitting < num_workers:
        raise ConfigError(
            f"all workers must fit into the cluster, got {num_workers} of {needed:g} {name} each "
            "with "
            f"{available:g} {name}, enough for {num_fitting}; choose fewer"
        )
    return {f"num_{name.lower()}s": needed}, num_workers
