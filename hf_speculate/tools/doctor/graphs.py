"""Device graphs of draft steps and verifications, replayed and compared with the eager forwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_speculate.cache.preallocated import MaskSpec
from hf_speculate.draft.token_choice import DraftSettings
from hf_speculate.models.folded_attention import folding
from hf_speculate.models.runner import GRAPH_BACKENDS, CompiledUnits
from hf_speculate.options.compiled.drafter import STEP_QUERY_LEN, Carry, draft_step
from hf_speculate.options.compiled.graph_trial import GraphTrial
from hf_speculate.options.compiled.graphs import Graphing
from hf_speculate.options.compiled.language_model import MIN_WIDTH, UNREAD_COLUMNS, Rows, States, forward_rows
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.doctor.pair import VOCAB_SIZE, Pair, make_pair, make_prompts
from hf_speculate.tools.doctor.site import Check, NotHere, Site, require
from hf_speculate.tools.doctor.texts import check_text, decode, name_of
from hf_speculate.types import NoiseKeys

NUM_REPLAYS, NUM_STEPS, QUERY_LEN = 4, 3, 4
ROWS = {"one row": 1, "four ragged rows": 4}
_PROMPT_LEN = 12


def graph_checks(dtypes: tuple[torch.dtype, ...]) -> dict[str, Check]:
    """By name, checks of forwards and of texts, for each number of rows and dtype."""
    checks: dict[str, Check] = {}
    for dtype in dtypes:
        for rows, batch_size in ROWS.items():
            checks[f"forwards, {rows}, {name_of(dtype)}"] = partial(_check_forwards, batch_size, dtype)
        checks[f"texts, {name_of(dtype)}"] = partial(_check_texts, dtype)
    return checks


def _needs_graphs(site: Site) -> None:
    if site.device.type not in GRAPH_BACKENDS:
        raise NotHere("graphs need a CUDA device")


def disturb(device: torch.device) -> None:
    """Do what other code on the device may do between two calls: allocate, free, and drop cuBLAS workspaces."""
    garbage = [torch.full((1 << power,), torch.nan, device=device) for power in range(8, 20)]
    side = torch.ones(96, 96, device=device)
    torch.mm(side, side)
    del garbage, side
    torch.cuda.empty_cache()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # as torch.compile does; builds for CPUs lack it


class _Buffers:
    """KV buffers with the states of prompts of several lengths, and what forwards over them take."""

    def __init__(self, site: Site, model: Any, batch_size: int):
        config, device = model.config, site.device
        head_width = config.hidden_size // config.num_attention_heads
        shape = batch_size, config.num_key_value_heads, MIN_WIDTH + UNREAD_COLUMNS, head_width
        buffers = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2 * config.num_hidden_layers)]
        self.states = States(tuple(buffers[::2]), tuple(buffers[1::2]))
        self.mask_spec = MaskSpec((None,) * config.num_hidden_layers, {"full_attention": None}, model.dtype)
        rows = torch.arange(batch_size, device=device)
        last = torch.tensor([config.max_position_embeddings - 1], device=device)
        self.rows = Rows(rows % 3, torch.arange(MIN_WIDTH, device=device), last)
        self.ends = _PROMPT_LEN - 2 * rows
        self._model = model
        self.forward(self.ids(_PROMPT_LEN, 0), torch.zeros_like(self.ends))

    def ids(self, num: int, seed: int) -> Tensor:
        """Token ids [B, num]."""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randint(3, VOCAB_SIZE, (len(self.ends), num), generator=generator, device="cpu").to(
            self.ends.device
        )

    def forward(self, query: Tensor, ends: Tensor) -> Any:
        """The eager forward, as a graph has it."""
        with torch.no_grad(), folding():
            return forward_rows(self._model, query, ends, self.rows, self.states, self.mask_spec)


def _check_forwards(batch_size: int, dtype: torch.dtype, site: Site) -> str:
    _needs_graphs(site)
    pair = make_pair(site, dtype)
    for part, compare in (("verification", _compare_verifications), ("draft step", _compare_steps)):
        model = pair.target if part == "verification" else pair.draft
        buffers, failures = _Buffers(site, model, batch_size), list[str]()
        runner = Graphing(model, CompiledUnits(), failures.append, False)
        runner.bind({})
        for index in range(NUM_REPLAYS):
            if index == NUM_REPLAYS // 2:
                disturb(site.device)
            difference = compare(site, runner, buffers, index)
            require(not failures, f"{part}: {' '.join(failures)}")
            require(not difference, f"{part}, replay {index + 1}: it differs from the eager forward {difference}")
    return f"{2 * NUM_REPLAYS} replays are as the eager forwards"


def _compared(replay: Callable[[], Any], eager: Callable[[], list[Any]], states: States) -> str:
    """How a replay differs from eager forwards; empty if it does not, or if nothing was captured."""
    results = replay()
    if results is None:
        return ""
    trial = GraphTrial(None)  # which times no first replay
    return trial.run(None, lambda: results, eager, 1, states).difference


def _compare_verifications(site: Site, runner: Graphing, buffers: _Buffers, index: int) -> str:
    query, ends = buffers.ids(QUERY_LEN, index + 1), buffers.ends + index

    def replay() -> list[Any] | None:
        scored = runner.run("forward", forward_rows, query, ends, buffers.rows, buffers.states, buffers.mask_spec, ())
        return None if scored is None else [scored]

    return _compared(replay, lambda: [buffers.forward(query, ends)], buffers.states)


def _compare_steps(site: Site, runner: Graphing, buffers: _Buffers, index: int) -> str:
    """Greedy steps, then sampled ones."""
    settings = DraftSettings(
        backend="torch" if site.is_simulated else "auto"  # a simulated graph records no Triton kernel
    )
    constant = buffers.rows, buffers.states, buffers.mask_spec, settings
    for is_sampled in (False, True):
        zeros = torch.zeros_like(buffers.ends)
        keys = NoiseKeys(zeros + 7, zeros + index, buffers.ends + index) if is_sampled else None
        carry = Carry(buffers.ids(STEP_QUERY_LEN, index + 1), buffers.ends + index, keys)

        def eager(carry: Carry = carry) -> list[Any]:
            results = []
            with torch.no_grad(), folding():
                for _ in range(NUM_STEPS):
                    result, carry = draft_step(runner.model, carry, *constant)
                    results.append(result)
            return results

        name = f"step, {is_sampled}"
        replay = partial(runner.repeat, name, draft_step, NUM_STEPS, carry, *constant)
        if difference := _compared(replay, eager, buffers.states):
            return f"{difference} ({'sampled' if is_sampled else 'greedy'})"
    return ""


def _check_texts(dtype: torch.dtype, site: Site) -> str:
    _needs_graphs(site)
    pair, gaps = make_pair(site, dtype), []
    for batch_size in site.batch_sizes:
        inputs = make_prompts(site, batch_size)
        texts = []
        for _ in range(2):
            stats = SpeculationStats()
            texts.append(_graphed_text(pair, inputs, site, stats))
            require(stats.graphed == ["target", "draft"], f"not all ran from graphs: {'; '.join(stats.fallbacks)}")
            gaps.append(check_text(pair, inputs, texts[-1], site, dtype))
            disturb(site.device)
        require(bool((texts[0] == texts[1]).all()), "a text was another one when graphs were replayed later")
    return f"largest gap {max(gaps):.3g}"


def _graphed_text(pair: Pair, inputs: dict[str, Tensor], site: Site, stats: SpeculationStats) -> Tensor:
    return decode(pair, inputs, site, do_sample=False, speculation_graphs="on", speculation_stats=stats)
