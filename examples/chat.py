"""A chat in the terminal: answers appear as they come, and nothing is read twice.

    python examples/chat.py --max-new-tokens 48

The target's states stay in a cache that is passed to every turn, the draft's in a `DraftState`. The bundled pair
continues Python code and knows no chat, so it is given a template that writes what you say as a comment; a pair with a
template of its own is named with `--target` and `--draft`. An empty line, or the end of the input, ends the chat.
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
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}# {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n\n{% endif %}{% endfor %}"
)


class Chat:
    """Messages, and what the models have read of them.

    Args:
        target: enabled.
        draft: proposes.
        tokenizer: with a chat template.
        **options: of every `generate()`.
    """

    def __init__(
        self, target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
    ):
        self.target, self.draft, self.tokenizer, self.options = target, draft, tokenizer, options
        self.messages: list[dict[str, str]] = []
        self.stats = hf_speculate.SpeculationStats()
        self.num_read = 0  # tokens of the last prompt that the target had not read before
        self._cache = DynamicCache(config=target.config)
        self._cached_ids: list[int] = []
        self._draft_state = hf_speculate.DraftState()

    def answer(self, text: str, streamer: TextStreamer | None = None) -> str:
        """Say something, and get the answer.

        Args:
            text: of the user.
            streamer: is given the answer token by token.
        """
        self.messages.append({"role": "user", "content": text})
        prompt = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(self.target.device)
        ids = inputs["input_ids"]  # [1, T]
        self._forget_from(self._num_shared(ids[0].tolist()))
        self.num_read = ids.shape[1] - len(self._cached_ids)
        output = self.target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.draft,
            past_key_values=self._cache,
            draft_state=self._draft_state,
            streamer=streamer,
            speculation_stats=self.stats,
            **self.options,
        )
        self._cached_ids = output[0, :-1].tolist()  # the newest token is read by the next turn
        answer = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def _num_shared(self, ids: list[int]) -> int:
        """Tokens at the beginning of a prompt whose states are cached; one at least is left to be read.

        Text that was decoded and encoded again may consist of other tokens, and templates may drop what was said.
        """
        pairs = enumerate(zip(ids[:-1], self._cached_ids, strict=False))
        return next((place for place, (one, other) in pairs if one != other), min(len(ids) - 1, len(self._cached_ids)))

    def _forget_from(self, num_tokens: int) -> None:
        """Keep the states of the first `num_tokens` tokens."""
        if num_tokens == 0:
            self._cache = DynamicCache(config=self.target.config)
        elif num_tokens < len(self._cached_ids):
            self._cache.crop(num_tokens - len(self._cached_ids))
        del self._cached_ids[num_tokens:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(PAIR / "target"), help="name or path")
    parser.add_argument("--draft", default=str(PAIR / "draft"), help="name or path")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--sample", action="store_true", help="draw tokens, instead of taking the likeliest")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    target = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(args.target))
    draft = AutoModelForCausalLM.from_pretrained(args.draft)
    chat = Chat(target, draft, tokenizer, max_new_tokens=args.max_new_tokens, do_sample=args.sample)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        text = sys.stdin.readline().strip()
        if not text:
            return
        chat.answer(text, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        print(f"[{chat.num_read} tokens read, {chat.stats.tokens_per_round:.2f} a round]")


if __name__ == "__main__":
    main()
