"""Evaluation inside a training loop: a `Seq2SeqTrainer` hands `generate()` the labels too."""

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_speculate
from tests.cases import assert_decodes_as_plain, assert_equal_ids, pair
from tests.tiny import noisy_copy, ragged_prompts
from tests.tiny_encoders import make_t5


@pytest.mark.parametrize("batch_size", [1, 3])
def test_labels_are_passed_over(batch_size):
    inputs = ragged_prompts(batch_size, seed=1)
    assert_decodes_as_plain(*pair("llama"), {**inputs, "labels": inputs["input_ids"]}, max_new_tokens=12)


@pytest.mark.parametrize("source", ["assistant", "prompt lookup"])
def test_a_trainer_predicts_the_same_with_drafts(tmp_path, source):
    target = make_t5()
    inputs = ragged_prompts(4, seed=2)
    data = [
        {"input_ids": ids, "attention_mask": mask, "labels": ids} for ids, mask in zip(*inputs.values(), strict=True)
    ]
    settings = Seq2SeqTrainingArguments(
        tmp_path, predict_with_generate=True, use_cpu=True, report_to=[], per_device_eval_batch_size=2
    )
    trainer = Seq2SeqTrainer(
        hf_speculate.enable(target),
        settings,
        compute_metrics=lambda out: {"mean_id": float(out.predictions.mean()), "num_labels": int(out.label_ids.size)},
    )
    stats = hf_speculate.SpeculationStats()
    plain = trainer.predict(data, max_new_tokens=12)
    options = {"assistant_model": noisy_copy(target), "num_assistant_tokens": 3}
    if source == "prompt lookup":
        options = {"prompt_lookup_num_tokens": 3}
    ours = trainer.predict(data, max_new_tokens=12, speculation_stats=stats, **options)
    assert_equal_ids(torch.tensor(plain.predictions), torch.tensor(ours.predictions))
    for name in ("test_loss", "test_mean_id", "test_num_labels"):
        assert plain.metrics[name] == ours.metrics[name]
    assert stats.num_accepted > 0
