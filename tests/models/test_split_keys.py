"""Attention with split keys: what it serves once it is on, and verification through it, on the fake GPU."""

from collections.abc import Iterator

import pytest
import torch

import hf_speculate
from hf_speculate.models.attention_backends import split_keys_from
from tests.cases import assert_equal_ids
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
