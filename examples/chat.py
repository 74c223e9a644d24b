"""A chat that reads every turn once: the target's cache and the draft's states are kept from turn to turn.

    python examples/chat.py
    python examples/chat.py --target <model> --draft <smaller model> --sample

Lines of the standard input are what the user says; an empty one, or its end, ends the chat. The bundled pair knows code
alone: it goes on where a conversation would answer.
"""

import argparse
import sys
from pathlib import Path
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

PAIR = Path(__file__).resolve().parent / "pair"
# For tokenizers without a template of their own, as the bundled one.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}# {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)


class Chat:
    """What was said, and what the models have read of it.

    Args:
        target: an enabled model whose layers attend to everything, for its cache is cut back where texts part.
        draft: the draft model.
        tokenizer: the target's.
        **options: of `generate()`.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
    ):
        self.target, self.draft, self.tokenizer, self.options = target, draft, tokenizer, options
        self.messages: list[dict[str, str]] = []
        self.read_ids: list[int] = []  # that the cache holds the states of, and the one after them
        self.cache = DynamicCache(config=target.config)
        self.draft_state = hf_speculate.DraftState()
        self.stats = hf_speculate.SpeculationStats()
        if tokenizer.chat_template is None:
            tokenizer.chat_template = TEMPLATE

    def say(self, text: str, streamer: TextStreamer | None = None) -> str:
        """The answer to what the user says."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        self._forget_past(ids)
        output = self.target.generate(
            torch.tensor([ids], device=self.target.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=self.target.device),
            assistant_model=self.draft,
            past_key_values=self.cache,
            draft_state=self.draft_state,  # cuts itself back
            speculation_stats=self.stats,
            streamer=streamer,
            **self.options,
        )
        self.read_ids = output[0].tolist()
        answer = self.tokenizer.decode(self.read_ids[len(ids) :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _forget_past(self, ids: list[int]) -> None:
        """Cut the cache back to what the new prompt begins with: a template may write an answer in other tokens."""
        num_held = self.cache.get_seq_length()
        pairs = zip(ids[:-1], self.read_ids[:num_held], strict=False)  # one token at least is read now
        num_same = next((place for place, (new, old) in enumerate(pairs) if new != old), min(num_held, len(ids) - 1))
        if num_held > num_same:
            self.cache.crop(num_same - num_held)


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a target that drafts.")
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--sample", action="store_true", help="draw tokens, instead of taking the likeliest")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
        for name in (arguments.target, arguments.draft)
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.sample}
    chat = Chat(hf_speculate.enable(target), draft, tokenizer, **options)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        chat.say(line, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        stats = chat.stats
        print(
            f"[mean acceptance length {stats.mean_acceptance_length:.2f}, acceptance rate {stats.acceptance_rate:.0%}]"
        )


if __name__ == "__main__":
    main()
