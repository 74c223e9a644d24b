"""Compare every method with its own `generate()` call, and its texts with plain decoding."""

import copy
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_speculate.generation.enable import enable, is_enabled
from hf_speculate.stats import SpeculationStats
from hf_speculate.tools.bench.decoding import Batch, Decoder, Run
from hf_speculate.tools.bench.methods import DraftLen, assisted_methods, our_methods, plain_method
from hf_speculate.tools.bench.quality import Compared, TextCheck, drift_of_runs
from tests.support.tiny import cheaper_copy, make_model, noisy_copy, ragged_prompts

NUM_NEW = 12


@pytest.fixture(scope="module")
def target():
    return make_model("llama")


@pytest.fixture(scope="module")
def batch():
    inputs = ragged_prompts(3, seed=4)
    return Batch(0, inputs["input_ids"], inputs["attention_mask"])


def plain_texts(target, batch, **options):
    output = target.generate(**batch.inputs, max_new_tokens=NUM_NEW, do_sample=False, **options)
    return output[:, batch.input_ids.shape[1] :].tolist()


LENS = [DraftLen(3, False), DraftLen(None, True)]
METHODS = [
    plain_method(False),
    *assisted_methods(LENS, False),
    *our_methods(["greedy"], LENS, False, {}),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(("enabled", "options"), [(False, {}), (True, {"repetition_penalty": 1.8})])
def test_greedy_methods_ignore_settings_in_configs(method, enabled, options, target, batch):
    model, draft, lens = copy.deepcopy(target), cheaper_copy(target), []
    ours = {"verifier": "typical", "posterior_threshold": 0.5, "num_assistant_tokens": 7}
    for config in (model.generation_config, draft.generation_config) if enabled else ():
        vars(config).update(ours, prompt_lookup_num_tokens=4)
    if enabled:
        enable(model, draft, num_assistant_tokens=7)
    decoder = Decoder(model, {"assistant_model": draft}, {"max_new_tokens": NUM_NEW, **options})
    # Wait before the first token only.
    model.register_forward_pre_hook(lambda *args: time.sleep(0.1 * (not lens)))
    model.register_forward_hook(lambda module, args, output: lens.append(output.logits.shape[1]))
    decoded = decoder(method, batch, 0)
    assert decoded.texts == plain_texts(target, batch, **options)
    assert 0.1 < decoded.first_token_s < 2
    assert len(model._forward_hooks) == 1  # the hook registered above
    assert is_enabled(model) is enabled
    assert (decoded.stats is not None) is (method.engine == "ours")
    assert decoded.stats is None or decoded.stats.verifier == "greedy"
    assert 8 not in lens[1:]
    if method.num_assistant_tokens:
        assert max(lens[1:]) == 4  # the drafted tokens and the one before them
    model.generation_config.eos_token_id = [11, 12]
    assert Decoder(model, {}, {}).eos_token_ids == {11, 12}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_peft_models_are_measured_with_their_adapters(method, target, batch):
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    models = [
        get_peft_model(model, lora).eval().to(torch.float64)
        for model in (copy.deepcopy(target), cheaper_copy(target))
    ]
    wrapped, draft = enable(models[0]), models[1]
    decoder = Decoder(wrapped, {"assistant_model": draft}, {"max_new_tokens": NUM_NEW})
    assert (
        decoder(method, batch, 0).texts == plain_texts(wrapped, batch) != plain_texts(target, batch)
    )


@pytest.mark.parametrize("verifier", [None, "coupled"])
def test_sampling_methods_get_seeds_and_temperature(verifier, target, batch):
    draft = noisy_copy(target)
    method = our_methods([verifier], LENS, True, {})[0] if verifier else plain_method(True)

    def texts(temperature, seed):
        arguments = {"max_new_tokens": NUM_NEW, "temperature": temperature}
        decoder = Decoder(target, {"assistant_model": draft}, arguments)
        return decoder(method, batch, seed).texts

    assert texts(1e-4, 0) == plain_texts(target, batch)
    assert texts(0.8, 1) == texts(0.8, 1) != texts(0.8, 2)


def test_near_tie_with_plain_decoding_is_not_wrong(batch):
    model = make_model("llama", dtype=torch.bfloat16)
    plain = plain_texts(model, batch)
    row = next(row for row, text in enumerate(plain) if len(set(text)) > 1)
    best, tied = (
        plain[row][0],
        next(token_id for token_id in range(1, 64) if not any(token_id in text for text in plain)),
    )
    head = model.get_output_embeddings().weight
    head[tied] = head[best]  # equally likely wherever the best token is
    plain = plain_texts(model, batch)
    replacement = tied if plain[row][0] == best else best
    worst = int(model(input_ids=batch.rows[row][None]).logits[0, -1].argmin())
    check = TextCheck(Decoder(model, {}, {}))
    # The runs come in another order.
    others = [Run(batch, 1, 1.0, [[]] * 3, None), Run(batch, 0, 1.0, plain, None)]
    for text, outcome in (
        (plain[row], Compared(num_equal=6)),
        ([replacement, *plain[row][1:]], Compared(num_equal=5, num_ties=1)),
        ([worst, *plain[row][1:]], Compared(num_equal=5, num_wrong=1)),
        (plain[row][:5], Compared(num_equal=5, num_wrong=1)),  # ends at another token
    ):
        texts = [text if at == row else token_id for at, token_id in enumerate(plain)]
        for method, stats in (
            (METHODS[3], SpeculationStats(rounds_by_draft_len={3: 1})),
            (METHODS[2], None),
        ):
            runs = [
                Run(batch, at, 1.0, token_id, stats)
                for at, token_id in enumerate((texts, [[]] * 3))
            ]
            assert check(method, runs, others) == outcome


@torch.no_grad()
def test_drift_is_the_log_likelihood_of_every_token(batch):
    model, row = make_model("gpt2"), batch.rows[0]
    greedy = model.generate(
        row[None], attention_mask=torch.ones_like(row)[None], max_new_tokens=80, do_sample=False
    )
    greedy = greedy[0, len(row) :].tolist()
    texts, likelihood = (
        [greedy, [7, 7, 20, 33, 1], [*greedy[:70], (greedy[70] + 1) % 64, *greedy[71:]]],
        0.0,
    )
    for prompt, text in zip(batch.rows, texts, strict=True):
        ids = torch.cat([prompt, torch.tensor(text)])[None]
        likelihood -= len(text) * float(
            model(ids, labels=ids.where(torch.arange(ids.shape[1]) >= len(prompt), -100)).loss
        )
    drift = drift_of_runs(model, [Run(batch, 0, 1.0, texts, None)])
    assert drift.log_likelihood == pytest.approx(likelihood)
    assert (drift.num_tokens, drift.log_likelihood_per_token) == (165, drift.log_likelihood / 165)
    alone = batch._replace(input_ids=batch.input_ids[:1], attention_mask=batch.attention_mask[:1])
    assert (
        drift_of_runs(model, [Run(alone, 0, 1.0, [greedy], None)]).agreement
        == 1.0
        > drift.agreement
    )
