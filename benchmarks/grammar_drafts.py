"""Count tokens per forward for SmolLM2 under grammars.

    python benchmarks/grammar_drafts.py

Drafts come from forced text, prompt lookup, both, or neither. SmolLM2 answers thirty JSON schemas
greedily, with one row in float32 and the matcher from `examples/grammar.py` (`pip install
".[grammar]"`). Every method drafts up to 10 tokens in each round, so the counts do not depend on
the machine. A schema counts only if all texts are equal.
"""

import argparse
import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from _harness import add_common_arguments, markdown, parse_common, write_results
from _real_models import SMOLLM2, chat_prompt, model_folder
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate

NAME = "grammar_drafts"
NUM_DRAFTED = 10
LOOKUP = {"prompt_lookup_num_tokens": NUM_DRAFTED, "num_assistant_tokens": NUM_DRAFTED}
METHODS: dict[str, dict[str, Any]] = {
    "neither": {},
    "grammar": {"grammar_draft": True, "num_assistant_tokens": NUM_DRAFTED},
    "lookup": {"grammar_draft": False, **LOOKUP},
    "both": LOOKUP,
}
Schema = dict[str, Any]


class Task(NamedTuple):
    """Request and schema of the answer."""

    kind: str
    asked: str
    schema: Schema


LONG, TEXT, WORD = ({"type": "string", "maxLength": max_chars} for max_chars in (120, 40, 16))
YES_NO, COUNT = {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**fields: Schema) -> Schema:
    """Return the schema for an object with these fields, in this order."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def some(entry: Schema, max_items: int = 3) -> Schema:
    return {"type": "array", "items": entry, "minItems": 1, "maxItems": max_items}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def call(name: str, **arguments: Schema) -> Schema:
    """Return the schema for a tool call in the format of chat models."""
    return record(name={"const": name}, arguments=record(**arguments))


WEATHER = call("get_current_weather", location=WORD, unit=one_of("celsius", "fahrenheit"))
SEARCH = call("search_documents", query=TEXT, max_results=COUNT, include_archived=YES_NO)
MAIL = call("send_email_message", recipient_address=WORD, subject_line=TEXT, has_attachment=YES_NO)
TASKS = (
    # Rigid: few values are free.
    Task(
        "rigid",
        "Is the sky blue?",
        record(question_is_clear=YES_NO, answer_is_yes=YES_NO, needs_follow_up=YES_NO),
    ),
    Task(
        "rigid",
        "Describe a web server.",
        record(protocol_version={"const": "1.1"}, keep_alive_enabled=YES_NO),
    ),
    Task(
        "rigid",
        "Rate this film: The Iron Giant.",
        record(story_rating=COUNT, music_rating=COUNT, picture_rating=COUNT),
    ),
    Task(
        "rigid",
        "Which permissions does a guest have?",
        record(can_read=YES_NO, can_write=YES_NO, can_delete=YES_NO),
    ),
    Task(
        "rigid",
        "Give the size of a sheet of A4 paper.",
        record(width_in_millimetres=COUNT, height_in_millimetres=COUNT),
    ),
    Task(
        "rigid",
        "Count the legs of a spider and of a horse.",
        record(legs_of_a_spider=COUNT, legs_of_a_horse=COUNT),
    ),
    # Loose: most of the text is free.
    Task("loose", "Write two sentences about rivers.", record(text=LONG)),
    Task("loose", "Name three cities.", some(WORD)),
    Task("loose", "Give me tips for learning a language.", some(TEXT)),
    Task("loose", "Who was Ada Lovelace?", record(name=TEXT, biography=LONG)),
    Task("loose", "Translate 'good morning' to French and German.", record(fr=TEXT, de=TEXT)),
    Task("loose", "Summarise the story of Icarus.", record(title=TEXT, summary=LONG)),
    # Nested: objects contain objects and lists.
    Task(
        "nested",
        "Describe a customer called Maria.",
        record(
            customer=record(
                full_name=WORD,
                address=record(street=WORD, city=WORD, postal_code=WORD),
                is_active=YES_NO,
            )
        ),
    ),
    Task(
        "nested",
        "Write an order of two books.",
        record(
            order_number=COUNT,
            items=some(record(product_name=TEXT, quantity=COUNT, unit_price=COUNT), 2),
        ),
    ),
    Task(
        "nested",
        "Describe a house with two rooms.",
        record(
            building=record(
                rooms=some(record(room_name=WORD, window_count=COUNT), 2), has_garden=YES_NO
            )
        ),
    ),
    Task(
        "nested",
        "Write the settings of an editor.",
        record(
            editor=record(
                font=record(family=WORD, size_in_points=COUNT),
                theme=record(name=WORD, is_dark=YES_NO),
            )
        ),
    ),
    Task(
        "nested",
        "Describe a football match.",
        record(
            home_team=record(name=WORD, goals=COUNT),
            away_team=record(name=WORD, goals=COUNT),
            was_cancelled=YES_NO,
        ),
    ),
    Task(
        "nested",
        "Describe a family of three.",
        some(
            record(
                first_name=WORD,
                age_in_years=COUNT,
                relationship=one_of("mother", "father", "child"),
            )
        ),
    ),
    # Enums: values are chosen from a few words.
    Task(
        "enums",
        "What is the mood of 'I love it'?",
        record(sentiment=one_of("positive", "negative", "neutral")),
    ),
    Task(
        "enums",
        "Sort this message: my parcel is late.",
        record(
            category=one_of("delivery problem", "payment problem", "product question"),
            priority=one_of("low priority", "normal priority", "high priority"),
        ),
    ),
    Task(
        "enums",
        "Name the season in which snow falls.",
        record(
            season=one_of("spring", "summer", "autumn", "winter"),
            hemisphere=one_of("northern", "southern"),
        ),
    ),
    Task(
        "enums",
        "What kind of animal is a whale?",
        record(
            animal_class=one_of("mammal", "bird", "fish", "reptile"),
            habitat=one_of("ocean", "forest", "desert"),
        ),
    ),
    Task(
        "enums",
        "Choose the next step of the robot.",
        some(
            record(
                action=one_of("move_forward", "turn_left", "turn_right", "stop_engine"),
                repeat=COUNT,
            )
        ),
    ),
    Task(
        "enums",
        "Review this pull request.",
        record(
            verdict=one_of("approve", "request_changes", "comment"),
            risk_level=one_of("low", "medium", "high"),
        ),
    ),
    # Tool calls: the answer calls a tool, or one of several tools.
    Task("tool calls", "What is the weather in Paris?", WEATHER),
    Task("tool calls", "Find papers about whales.", SEARCH),
    Task("tool calls", "Write to ann@example.com that I am late.", MAIL),
    Task("tool calls", "Is it warm in Lima today?", {"anyOf": [WEATHER, SEARCH, MAIL]}),
    Task("tool calls", "Look for the contract of last year.", {"anyOf": [WEATHER, SEARCH, MAIL]}),
    Task(
        "tool calls",
        "Do both: weather in Rome, and search for hotels.",
        some({"anyOf": [WEATHER, SEARCH]}, 2),
    ),
)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode every task with every method."""
    # a module of examples/; exits without xgrammar
    example: Any = importlib.import_module("grammar")
    folder = model_folder(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    target = hf_speculate.enable(model.to(args.device).eval())
    rows = []
    for task in tqdm(TASKS, disable=None):
        grammar = example.compile_json(tokenizer, target.config.vocab_size, task.schema)
        prompt = chat_prompt(tokenizer, f"{task.asked} Answer in JSON.")
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(args.device)
        texts, forwards = {}, {}
        for name, options in METHODS.items():
            stats = hf_speculate.SpeculationStats()
            ids = target.generate(
                **inputs,
                **options,
                tokenizer=tokenizer,
                logits_processor=[example.GrammarProcessor(grammar)],
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
                speculation_stats=stats,
            )
            texts[name] = ids[0, inputs["input_ids"].shape[1] :].tolist()
            # One more forward reads the prompt.
            forwards[name] = stats.num_rounds + 1 if options else len(texts[name])
        rows.append(
            {
                "kind": task.kind,
                "asked": task.asked,
                "text": tokenizer.decode(texts["neither"], skip_special_tokens=True),
                "num_tokens": len(texts["neither"]),
                "forwards": forwards,
                "is_equal": all(text == texts["neither"] for text in texts.values()),
            }
        )
    return rows


def tokens_per_forward(rows: Iterable[dict[str, Any]], method: str) -> float:
    counted = [row for row in rows if row["is_equal"]]
    return float(
        sum(row["num_tokens"] for row in counted) / sum(row["forwards"][method] for row in counted)
    )


def table(content: dict[str, Any]) -> str:
    """Format tokens per target forward as Markdown, by kind of schema."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in content["rows"]:
        by_kind.setdefault(row["kind"], []).append(row)
    columns = {
        "schemas": lambda entry: entry[0],
        "texts": lambda entry: sum(row["is_equal"] for row in entry[1]),
    }
    for method in METHODS:
        columns[method] = lambda entry, method=method: tokens_per_forward(entry[1], method)
    return markdown(columns, [*by_kind.items(), ("all", content["rows"])])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser, repeats=1, limit_s=3600.0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parse_common(parser)
    rows = measure(args)
    path = write_results(NAME, args, rows, args.results)
    print(table({"rows": rows}))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
