"""Save settings with a model, and decode with any model using settings from a repository.

    python examples/hub_config.py

Nothing is uploaded. `push_to_hub=True` and `repo_id=` would upload the same files to the Hub;
`custom_generate=` then takes the name of the repository instead of a folder.
"""

import json
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

EXAMPLES = Path(__file__).resolve().parent
PROMPT = "class Stack:\n"
NUM_NEW = 24


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pair" / "target")
    draft = AutoModelForCausalLM.from_pretrained(EXAMPLES / "pair" / "draft")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    stats = hf_speculate.SpeculationStats()

    with tempfile.TemporaryDirectory() as folder:
        # 1. The owner of the weights saves the settings next to them.
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "pair" / "target")
        model.save_pretrained(folder)
        hf_speculate.save_config(
            model, folder, verifier="typical", num_assistant_tokens=4, posterior_threshold=0.2
        )
        fields = json.loads((Path(folder) / "generation_config.json").read_text(encoding="utf-8"))
        names = ("verifier", "num_assistant_tokens")
        print(f"saved: {', '.join(f'{name}={fields[name]}' for name in names)}")

        # 2. Users load the folder without having to know the settings.
        loaded = hf_speculate.enable(AutoModelForCausalLM.from_pretrained(folder))
    loaded.generate(
        **inputs, assistant_model=draft, max_new_tokens=NUM_NEW, speculation_stats=stats
    )
    print(
        f"loaded: verifier={stats.verifier}, mean acceptance length "
        f"{stats.mean_acceptance_length:.2f}"
    )

    # 3. A repository without weights holds settings for any model, enabled or not. transformers #
    # runs custom_generate/generate.py from it, which requires trust_remote_code.
    output = model.generate(
        **inputs,
        custom_generate=str(EXAMPLES / "hub" / "typical"),
        trust_remote_code=True,
        assistant_model=draft,
        max_new_tokens=NUM_NEW,
        speculation_stats=stats,
    )
    print(
        f"custom_generate: verifier={stats.verifier}, mean acceptance length "
        f"{stats.mean_acceptance_length:.2f}\n"
    )
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
