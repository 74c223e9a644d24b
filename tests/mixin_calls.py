"""The calls that transformers' own generation tests make, each a function of a model and its prompt."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

NUM_NEW = 8
NUMBERS: dict[str, Any] = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
EVERYTHING = NUMBERS | {"output_hidden_states": True, "output_attentions": True}
PROCESSORS: dict[str, Any] = {"bad_words_ids": [[1, 0]], "repetition_penalty": 1.2, "remove_invalid_values": True}
WARPERS: dict[str, Any] = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}


class Subject(NamedTuple):
    """A model, its prompt and how `generate()` is called."""

    model: PreTrainedModel
    inputs: dict[str, Any]
    sources: dict[str, Any]  # what makes the call speculative; empty for plain decoding

    def generate(self, **options: Any) -> Any:
        """One greedy call of `NUM_NEW` tokens, unless the options say otherwise."""
        torch.manual_seed(0)
        if "max_length" not in options:
            options = {"max_new_tokens": NUM_NEW} | options
        return self.model.generate(**options, **self.sources)

    @property
    def text(self) -> str:
        """The name of the argument that holds the tokens of the prompt that the output shows."""
        return "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"

    @property
    def is_text_alone(self) -> bool:
        """Whether nothing but tokens and a mask is read."""
        return set(self.inputs) <= {"input_ids", "attention_mask"} and not self.model.config.is_encoder_decoder

    def longer(self, output: Any) -> dict[str, Any]:
        """The prompt of a call that continues another, whose cache is passed on."""
        name = self.text.replace("input_ids", "attention_mask")
        mask = self.inputs.get(name, torch.ones_like(output.sequences[:, :0]))
        num_new = output.sequences.shape[1] - mask.shape[1]
        mask = torch.cat([mask, mask.new_ones(len(mask), num_new)], dim=1)
        kept = self.inputs if self.model.config.is_encoder_decoder else {}  # pictures are read with the first prompt
        return {**kept, self.text: output.sequences, name: mask, "past_key_values": output.past_key_values}


Call = Callable[[Subject], Any]
# Calls that differ from others in their options only.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": NUMBERS | PROCESSORS,
    "greedy_ids": {},
    "everything": EVERYTHING,
    "everything_of_one_row": EVERYTHING,
    "everything_of_one_row_without_cache": EVERYTHING | {"use_cache": False},
    "logits_to_keep": NUMBERS | {"logits_to_keep": 0},
    "static_cache": NUMBERS | {"cache_implementation": "static"},
    "offloaded_cache": NUMBERS | {"cache_implementation": "offloaded"},
    "returned_sequences": NUMBERS | {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "sampled": NUMBERS | WARPERS,
    "beams": NUMBERS | PROCESSORS | {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 2.0},
    "sampled_beams": NUMBERS | WARPERS | {"num_beams": 2},
}
# What is also called with eager attention, if the family has another one.
EAGER_CALLS = ("greedy", "everything", "everything_of_one_row", "continued_cache", "embeddings_alone")
NO_STATIC_CACHE = ("gpt_neo",)  # its plain decoding reads empty columns: the text differs from that of other caches
# These draw, or search: an enabled model alone must do as a plain one.
WITHOUT_DRAFTS = ("sampled", "beams", "sampled_beams")


class DoesNotApply(Exception):
    """The call makes no sense for the family."""


def only_if(applies: bool) -> None:
    """Leave a call that does not apply."""
    if not applies:
        raise DoesNotApply


def with_options(subject: Subject, options: dict[str, Any]) -> Any:
    only_if("static" not in options.values() or subject.model.config.model_type not in NO_STATIC_CACHE)
    only_if("logits_to_keep" not in options or "logits_to_keep" in inspect.signature(subject.model.forward).parameters)
    return subject.generate(**subject.inputs, **options)


def max_length(subject: Subject) -> Any:
    num_prompt = subject.inputs[subject.text].shape[1] if subject.text in subject.inputs else 1
    return subject.generate(**subject.inputs, max_length=num_prompt + NUM_NEW)


def config_object(subject: Subject) -> Any:
    config = copy.deepcopy(subject.model.generation_config)
    config.update(max_new_tokens=NUM_NEW, repetition_penalty=1.2)
    return subject.generate(**subject.inputs, **NUMBERS, generation_config=config)


def without_prompt(subject: Subject) -> Any:
    only_if(subject.is_text_alone)
    return subject.generate(bos_token_id=1, **NUMBERS)


def ends_at_eos(subject: Subject) -> Any:
    inputs = first_row(subject.inputs)
    text = subject._replace(sources={}).generate(**inputs)
    return subject.generate(**inputs, **NUMBERS, eos_token_id=int(text[0, -4]))


def position_ids(subject: Subject) -> Any:
    only_if(subject.is_text_alone)
    only_if("position_ids" in inspect.signature(subject.model.forward).parameters)
    mask = subject.inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return subject.generate(**subject.inputs, **NUMBERS, position_ids=positions)


def left_padding(subject: Subject) -> Any:
    only_if(subject.is_text_alone)
    pads = torch.zeros(len(subject.inputs["input_ids"]), 5, dtype=torch.int64)
    padded = {name: torch.cat([pads, value], dim=1) for name, value in subject.inputs.items()}
    return subject.generate(**padded, **NUMBERS)


def embeddings_and_ids(subject: Subject) -> Any:
    return subject.generate(**subject.inputs, inputs_embeds=embeddings(subject), **NUMBERS, min_new_tokens=5)


def embeddings_alone(subject: Subject, **options: Any) -> Any:
    only_if("static" not in options.values() or subject.model.config.model_type not in NO_STATIC_CACHE)
    embeds, mask = embeddings(subject), subject.inputs["attention_mask"]
    return subject.generate(inputs_embeds=embeds, attention_mask=mask, **NUMBERS, **options)


def other_embeddings(subject: Subject) -> Any:
    generator = torch.Generator().manual_seed(1)
    embeds = embeddings(subject)
    noise = torch.rand(embeds.shape, generator=generator, dtype=embeds.dtype)
    return subject.generate(**subject.inputs, inputs_embeds=noise, **NUMBERS)


def continued_embeddings(subject: Subject) -> Any:
    embeds, model = embeddings(subject)[:1], subject.model
    part = subject.generate(inputs_embeds=embeds, max_new_tokens=3, **NUMBERS)
    longer = torch.cat([embeds, model.get_input_embeddings()(part.sequences)], dim=1)
    return subject.generate(inputs_embeds=longer, past_key_values=part.past_key_values, **NUMBERS)


def continued_cache(subject: Subject) -> Any:
    part = subject.generate(**subject.inputs, max_new_tokens=3, **NUMBERS)
    return subject.generate(**subject.longer(part), **NUMBERS)


def passed_cache(subject: Subject) -> Any:
    only_if(not subject.model.config.is_encoder_decoder)
    own = DynamicCache(config=subject.model.config.get_text_config(decoder=True))
    output = subject.generate(**subject.inputs, **NUMBERS, past_key_values=own)
    assert output.past_key_values is own
    return output


def passed_static_cache(subject: Subject) -> Any:
    only_if(not subject.model.config.is_encoder_decoder and subject.model.config.model_type not in NO_STATIC_CACHE)
    own = StaticCache(config=subject.model.config.get_text_config(decoder=True), max_cache_len=48)
    part = subject.generate(**subject.inputs, max_new_tokens=3, **NUMBERS, past_key_values=own)
    return subject.generate(**subject.longer(part), **NUMBERS)


def encoder_outputs(subject: Subject) -> Any:
    only_if(subject.model.config.is_encoder_decoder)
    inputs = dict(subject.inputs)
    name = subject.model.main_input_name
    outputs = subject.model.get_encoder()(inputs.pop(name), return_dict=True)
    return subject.generate(encoder_outputs=outputs, **inputs, **NUMBERS)


def decoder_prompt(subject: Subject) -> Any:
    only_if(subject.model.config.is_encoder_decoder)
    start = subject.model.generation_config.decoder_start_token_id
    num_rows = len(subject.inputs[subject.model.main_input_name])
    ids = torch.tensor([[start, 5, 6]] * num_rows)
    return subject.generate(**subject.inputs, decoder_input_ids=ids, **NUMBERS)


CALLS: dict[str, Call] = {
    **{name: functools.partial(with_options, options=options) for name, options in OPTIONS.items()},
    "max_length": max_length,
    "config_object": config_object,
    "without_prompt": without_prompt,
    "ends_at_eos": ends_at_eos,
    "position_ids": position_ids,
    "left_padding": left_padding,
    "embeddings_and_ids": embeddings_and_ids,
    "embeddings_alone": embeddings_alone,
    "embeddings_in_a_static_cache": functools.partial(embeddings_alone, cache_implementation="static"),
    "other_embeddings": other_embeddings,
    "continued_embeddings": continued_embeddings,
    "continued_cache": continued_cache,
    "passed_cache": passed_cache,
    "passed_static_cache": passed_static_cache,
    "encoder_outputs": encoder_outputs,
    "decoder_prompt": decoder_prompt,
}


def first_row(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompt's first row."""
    return {name: value[:1] for name, value in inputs.items()}


def embeddings(subject: Subject) -> Tensor:
    """What the model makes of the prompt's tokens."""
    only_if(subject.is_text_alone)
    embed: Any = subject.model.get_input_embeddings()
    return embed(subject.inputs["input_ids"]).detach()
