"""Attention with split keys: what it serves once it is on, and verification through it, on the fake GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hf_speculate
from hf_speculate.models.attention_backends import split_keys_from
from hf_speculate.models.folded_attention import folded_attention, folding
from tests.cases import assert_equal_ids
from tests.fake_cuda import FakeCuda
from tests.gpu_rounds import counted, on_gpu
from tests.tiny import make_model, noisy_copy, ragged_prompts

pytest.importorskip("triton", reason="needs Triton")

KERNEL = "triton split_attention_kernel"
TOLERANCE = 1e-5  # float32 round-off of logits through the layers; a wrong mask moves them by 1e-2 and more


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    split_keys_from(None)


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 1), ("mistral_window", 2)])
def test_verification_gives_the_text_and_logits_of_plain(kind: str, batch_size: int) -> None:
    target = hf_speculate.enable(make_model(kind, dtype=torch.float32))
    draft, inputs = noisy_copy(target, 0.05, seed=1), ragged_prompts(batch_size, seed=2, min_len=4, max_len=20)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(**inputs, **options)
    split_keys_from(1)
    drafts = {"assistant_model": draft, "num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    with counted(target, draft) as rounds:
        ours = target.generate(**on_gpu(inputs), **drafts, **options)
        ids, logits = ours.sequences.cpu(), torch.stack(ours.logits).cpu()
        num_launches = rounds.gpu.log.launches["target"][KERNEL]
    assert_equal_ids(plain.sequences, ids)
    torch.testing.assert_close(logits, torch.stack(plain.logits), atol=TOLERANCE, rtol=0)
    assert num_launches >= 2 * 2  # layers of rounds


@pytest.mark.parametrize(
    ("num_query", "num_keys", "dtype", "is_masked", "is_split"),
    [
        (16, 40, torch.bfloat16, True, True),
        (1, 40, torch.float32, True, True),
        (17, 40, torch.bfloat16, True, False),
        (5, 39, torch.bfloat16, True, False),
        (1, 40, torch.bfloat16, False, False),  # flash attention splits keys itself
    ],
)
def test_few_masked_query_tokens_over_many_keys_are_split(
    num_query: int, num_keys: int, dtype: torch.dtype, is_masked: bool, is_split: bool
) -> None:
    module = nn.Module()
    module.num_key_value_groups = 2
    split_keys_from(40)
    with FakeCuda() as gpu, folding():
        query, key = (torch.randn(2, *sizes, 16, dtype=dtype, device="cuda:0")
                      for sizes in ((4, num_query), (2, num_keys)))  # fmt: skip
        mask = torch.zeros(2, 1, num_query, num_keys, dtype=dtype, device="cuda:0") if is_masked else None
        output, _ = folded_attention(module, query, key, key, mask)
        assert output.shape == (2, num_query, 4, 16)
        assert output.is_contiguous()
        assert (KERNEL in gpu.log.launches[""]) == is_split
