"""Chat with a model that reads every turn only once, because caches are kept between turns.

    python examples/chat.py
    python examples/chat.py --target <model> --draft <smaller model> --sample
    python examples/chat.py --tiny

Each line of the standard input is a turn of the user. /clear starts over, and an empty line or the
end of the input ends the chat. An error ends only the current turn. With --tiny, the script runs
the bundled pair, which only continues Python code.
"""

import argparse
import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

import hf_speculate
from models import TEMPLATE, load_models


class Chat:
    """Conversation that keeps the caches of both models.

    Args:
        target: an enabled model. All layers need full attention, because the cache is cropped.
        draft: the draft model.
            None if `options` names another draft source.
        tokenizer: the tokenizer of the target.
        **options: arguments of `generate()`, including `max_new_tokens`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        **options: Any,
    ):
        self.target, self.tokenizer, self.options = target, tokenizer, options
        if draft is not None:
            self.options = {**options, "assistant_model": draft}
        self.context: int | None = getattr(
            target.config.get_text_config(), "max_position_embeddings", None
        )
        self.messages: list[dict[str, str]] = []
        self.stats = hf_speculate.SpeculationStats()
        self.forget_states()
        if tokenizer.chat_template is None:
            tokenizer.chat_template = TEMPLATE

    def forget_states(self) -> None:
        """Clear the caches, which may hold part of a turn after an error."""
        self.read_ids: list[int] = []  # tokens of the cached states, and the next token
        self.cache = DynamicCache(config=self.target.config)
        # The cache of the draft model is kept too, and cropped together with the target's cache.
        if "assistant_model" in self.options:
            self.options["draft_state"] = hf_speculate.DraftState()

    def say(self, text: str, streamer: TextStreamer | None = None) -> str:
        """Answer the user; an error removes this turn from the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        max_answer_len = (
            self.options["max_new_tokens"] if self.context is None else self.context - len(ids)
        )
        if max_answer_len < 1:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the model's context {self.context}"
            )
        self._forget_past(ids)
        output = self.target.generate(
            torch.tensor([ids], device=self.target.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=self.target.device),
            cache=self.cache,
            speculation_stats=self.stats,
            streamer=streamer,
            **{
                **self.options,
                "max_new_tokens": min(self.options["max_new_tokens"], max_answer_len),
            },
        )
        self.read_ids = output[0].tolist()
        answer = self.tokenizer.decode(self.read_ids[len(ids) :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _forget_past(self, ids: list[int]) -> None:
        """Crop the cache to the common prefix with the new prompt.

        A chat template may write an answer with different tokens than were generated.
        """
        num_held = self.cache.get_seq_length()
        # At least one token must be read now.
        pairs = zip(ids[:-1], self.read_ids[:num_held], strict=False)
        num_same = next(
            (index for index, (new, old) in enumerate(pairs) if new != old),
            min(num_held, len(ids) - 1),
        )
        if num_held > num_same:
            self.cache.crop(num_same - num_held)


def start_chat(arguments: argparse.Namespace) -> Chat:
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample}
    if arguments.target is None:
        models = load_models(is_tiny=arguments.tiny)
        draft = models.options.get("assistant_model")
        return Chat(
            models.target, draft, models.tokenizer, **options, **({} if draft else models.options)
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device) if name else None
        for name in (arguments.target, arguments.draft)
    )
    drafting = {} if draft else {"prompt_lookup_num_tokens": 10}
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    return Chat(hf_speculate.enable(target), draft, tokenizer, **options, **drafting)


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model that decodes speculatively.")
    parser.add_argument(
        "--target", help="a model of your own; the default is SmolLM2-135M-Instruct"
    )
    parser.add_argument("--draft", help="its draft model; without one, prompt lookup drafts")
    parser.add_argument("--tiny", action="store_true", help="chat with the bundled 7 M pair")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument(
        "--sample", action="store_true", help="sample, instead of taking the most likely token"
    )
    chat = start_chat(parser.parse_args())
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        said: bytes | str = getattr(sys.stdin, "buffer", sys.stdin).readline()
        try:
            line = (said.decode("utf-8-sig") if isinstance(said, bytes) else said).rstrip("\r\n")
            if not line:
                return
            if line == "/clear":
                chat.messages = []
                continue
            chat.say(line, TextStreamer(chat.tokenizer, skip_prompt=True, skip_special_tokens=True))
        except Exception as error:  # noqa: BLE001  # models raise errors of all types
            chat.forget_states()
            print(f"{type(error).__name__}: {error}; the turn is left out, /clear starts over")
            continue
        stats = chat.stats
        print(
            f"[mean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate "
            f"{stats.acceptance_rate:.0%}]"
        )


if __name__ == "__main__":
    main()
