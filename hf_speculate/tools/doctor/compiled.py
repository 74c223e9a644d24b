"""A call whose forwards are compiled, against plain decoding."""

import torch

from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.doctor.pair import make_pair, make_prompts
from hf_speculate.tools.doctor.site import Check, Site, require
from hf_speculate.tools.doctor.texts import check_text, decode


def compiled_checks() -> dict[str, Check]:
    return {"greedy, float32": _check}


def _check(site: Site) -> str:
    pair, stats = make_pair(site, torch.float32), SpeculationStats()
    inputs = make_prompts(site, 1)
    options = {"cache_implementation": "static", "do_sample": False, "speculation_stats": stats}
    ids = decode(pair, inputs, site, **options)
    require(stats.compiled == ["target", "draft"], f"not all was compiled: {'; '.join(stats.fallbacks) or stats.plan}")
    return f"largest gap {check_text(pair, inputs, ids, site, torch.float32):.3g}"
