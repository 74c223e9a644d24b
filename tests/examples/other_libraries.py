"""Test that libraries calling `generate()` draft as on their page and keep their texts.

    make test-integrations

The target creates an environment for each library and runs its test. No other target collects this
file.
"""

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_speculate
from tests.page_code import PAIR, names_of_the_example
from tests.support.pages import blocks

PAGE = "docs/other-libraries.md"
STAND_IN = "Qwen/Qwen3-8B"
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}class Stack:\n"


@pytest.fixture
def names() -> dict[str, Any]:
    """Return the names from the quick start and from the executed blocks of the page."""
    return names_of_the_example()


def run_block(library: str, names: dict[str, Any], stand_in: str = STAND_IN) -> None:
    """Run the block of the page that imports the library."""
    imports = re.compile(rf"^(from|import) {library}\b", re.M)
    (code,) = filter(imports.search, blocks(PAGE, "python"))
    exec(compile(code.replace(STAND_IN, stand_in), f"{PAGE}, {library}", "exec"), names)


def accepted_tokens(model: Any, draft: Any, decode: Callable[[], Any]) -> list[int]:
    """Return the accepted tokens of each call; assert that the text equals plain decoding."""
    calls: list[hf_speculate.SpeculationStats] = []
    hf_speculate.enable(model, draft, num_assistant_tokens=4, speculation_stats=calls.append)
    drafted = decode()
    hf_speculate.disable(model)
    assert decode() == drafted
    assert calls
    return [stats.num_accepted for stats in calls]


@pytest.mark.fallback("lock step, because of StopOnTokens")
def test_langchain_huggingface(names: dict[str, Any]) -> None:
    run_block("transformers", names)

    def decode() -> tuple[str, str]:
        run_block("langchain_huggingface", names)
        parts = names["llm"].stream(names["prompts"][1], pipeline_kwargs=names["options"])
        return names["text"], "".join(parts)

    assert all(accepted_tokens(names["model"], names["draft"], decode))


@pytest.mark.fallback("lock step, because of StopOnTokens")
def test_llama_index(names: dict[str, Any]) -> None:
    def decode() -> tuple[str, str]:
        run_block("llama_index", names)
        parts = names["llm"].stream_complete(names["prompts"][1])
        return names["text"], "".join(part.delta for part in parts)

    assert all(accepted_tokens(names["model"], names["draft"], decode))


@pytest.mark.fallback("lock step, because of OutlinesCoreLogitsProcessor")
def test_outlines(names: dict[str, Any]) -> None:
    def decode() -> list[str]:
        run_block("outlines", names)
        batch = names["writer"].batch(names["prompts"], names["assignments"], max_new_tokens=24)
        return [names["text"], *batch]

    assert any(accepted_tokens(names["model"], names["draft"], decode))
    assert re.fullmatch(names["assignments"].pattern, names["text"])


@pytest.mark.fallback("lock step, because of StopOnStrings")
def test_smolagents(names: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(PAIR / "target", tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    run_block("smolagents", names, str(tmp_path / "target"))
    llm, messages = names["llm"], [names["question"]]

    def decode() -> tuple[str, str]:
        parts = llm.generate_stream(messages, stop_sequences=["return"])
        streamed = "".join(part.content or "" for part in parts)
        return llm(messages, stop_sequences=["return"]).content, streamed

    assert all(accepted_tokens(llm.model, names["draft"], decode))


@pytest.mark.fallback("lock step, because of MultiTokenEOSCriteria")
def test_lm_eval(
    names: dict[str, Any],
    run: Callable[..., str],
    import_example: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    names["task"] = import_example("lm_eval_harness").code_task(tmp_path, 4)

    def decode() -> list[Any]:
        run_block("lm_eval", names)
        samples = names["results"]["samples"]["continue_code"]
        return [sample["resps"] for sample in samples]

    assert all(accepted_tokens(names["model"], names["draft"], decode))
    printed = run("lm_eval_harness.py", "--num-prompts", "4")
    assert "answers equal plain decoding's: True" in printed
    assert float(re.search(r"mean acceptance length:? (\d+\.\d\d)", printed)[1]) > 1


@pytest.mark.fallback("the replaced forward LlamaForCausalLM.forward")
def test_trl(run: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = run("trl_rollouts.py")
    assert "epoch 3: tokens per target forward " in printed
    assert "greedy texts of the target equal plain decoding's: True" in printed

    def train(draft: Any) -> list[str]:
        """Train for two steps and return all rollouts, which must be the same for every draft."""
        names, rollouts = names_of_the_example(), []
        for field, value in {"verifier": "coupled", "seed": 1, "num_assistant_tokens": 4}.items():
            setattr(names["model"].generation_config, field, value)

        def reward(completions: list[str], **_: Any) -> list[float]:
            rollouts.extend(completions)
            return [float(len(set(text))) for text in completions]

        data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in names["prompts"]])
        settings = trl.GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        names |= {"draft": draft, "reward": reward, "data": data, "settings": settings}
        run_block("trl", names)
        return rollouts

    datasets, trl = map(importlib.import_module, ("datasets", "trl"))
    drafted = train(names_of_the_example()["draft"])
    rates = re.findall(r"'draft/acceptance_rate': '?([\d.]+)", capsys.readouterr().out)
    assert len(rates) == 2 and min(map(float, rates)) > 0
    assert train(None) == drafted
