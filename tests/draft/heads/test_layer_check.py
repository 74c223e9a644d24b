"""Whether a head reads the layers that it was trained on is measured, and few accepted drafts are a reason to."""

import warnings
from dataclasses import replace

import pytest
import torch

from hf_speculate.draft.heads.head import warn_of_low_first_acceptance
from hf_speculate.draft.heads.load import load_drafter
from hf_speculate.errors import ConfigError
from hf_speculate.stats import SpeculationStats
from tests.draft.heads.fitting import write_fitted
from tests.draft.heads.rounds import target_of
from tests.draft.heads.test_generate import FITTED, NUM_NEW, prompts
from tests.draft.heads.test_pard import write_pard


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder with a fitted head, and the texts that it was fitted to."""
    return write_fitted(tmp_path_factory.mktemp("head"), FITTED, target_of(), prompts(), NUM_NEW)


def test_the_right_layers_are_the_best(fitted):
    folder, texts = fitted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = load_drafter(folder, target_of()).check_layers(target_of(), texts)
    assert check.best_layers == check.layers == FITTED.aux_layers
    assert check.accuracies[0] > 0.4
    assert set(check.accuracies) == {0, -1}  # there is no layer behind the last
    assert 50 < check.num_tokens <= 200


def test_layers_that_are_off_by_one_are_found(fitted):
    folder, texts = fitted
    wrong = tuple(layer - 1 for layer in FITTED.aux_layers)
    head = load_drafter(folder, target_of(), aux_layers=wrong)
    with pytest.warns(UserWarning, match=r"load it with aux_layers=\[1, 3, 6\]"):
        check = head.check_layers(target_of(), texts, num_tokens=60)
    assert check.layers == wrong
    assert check.best_layers == FITTED.aux_layers
    assert check.accuracies[1] > 2 * check.accuracies[0]


def test_the_accuracy_is_that_of_greedy_drafts(fitted):
    """Padding is left out, and a tensor of prompts without any is taken as it is."""
    folder, texts = fitted
    head = load_drafter(folder, target_of())
    row = texts["input_ids"][-1:][:, texts["attention_mask"][-1].argmax() :]
    padded = {"input_ids": torch.nn.functional.pad(row, (3, 0)), "attention_mask": torch.ones_like(row)}
    padded["attention_mask"] = torch.nn.functional.pad(padded["attention_mask"], (3, 0))
    assert head.check_layers(target_of(), padded) == head.check_layers(target_of(), row)


def test_what_reads_no_layers_has_nothing_to_check(fitted, tmp_path):
    write_pard(tmp_path)
    with pytest.raises(ConfigError, match="check_layers needs a head that reads the states of layers"):
        load_drafter(tmp_path, target_of()).check_layers(target_of(), torch.ones(1, 9, dtype=torch.int64))
    with pytest.raises(ConfigError, match="prompts must hold a text of at least three tokens"):
        load_drafter(fitted[0], target_of()).check_layers(target_of(), torch.ones(1, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "warns"),
    [(199, 0, False), (200, 39, True), (200, 40, False), (10_000, 5_000, False)],
)
def test_few_accepted_first_drafts_are_a_reason_to_warn(fitted, num_drafted, num_accepted, warns):
    head = load_drafter(fitted[0], target_of())
    stats = SpeculationStats(drafted_per_position=[num_drafted, 9], accepted_per_position=[num_accepted, 9])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_low_first_acceptance(head.spec, stats)
        warn_of_low_first_acceptance(replace(head.spec, hidden_layers=(-1,)), stats)
    assert ["check_layers" in str(one.message) for one in caught] == [True] * warns
