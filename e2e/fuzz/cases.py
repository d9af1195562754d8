"""Bodies of requests with wrong, extreme and hostile values. Pure: a seed determines all of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_rollout.sglang.api import CHAT_COMPLETIONS, COMPLETIONS, GENERATE

MILLION = 10**6


def _tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with one argument, for ``tools`` of chats."""
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}}


NUMBERS = {
    **{str(number): str(number) for number in (0, -1, 1, 3, 0.5, -0.5, -2, 2049)},
    **{"2^31": str(2**31), "2^63": str(2**63), "-2^63-1": str(-(2**63) - 1), "400 digits": "9" * 400, "5000 digits": "9" * 5000},
    **{"1e308": "1e308", "-1e308": "-1e308", "1e999": "1e999", "NaN": "NaN", "Infinity": "Infinity", "-Infinity": "-Infinity"},
}
WORDS = {
    **{text: json.dumps(text) for text in ("", "a", "99999", "-1", "1e9", "true", "auto", "json_object", "required")},
    **{text: json.dumps(text) for text in ("/etc/passwd", "tcp://127.0.0.1:9", "http://127.0.0.1:9/x", "HEALTH_CHECK_1")},
    **{"NUL": r'"a\u0000b"', "lone surrogate": r'"\ud800"', "escapes": r'"\u0061\"\\"', "image": '"data:image/png;base64,AAAA"'},
}
GRAMMARS = {
    text: json.dumps(text)
    for text in (
        *("(.|..)" * 40 + "!", "(?#[)(.*)*(.*)*!(?#])"),
        *("(", "(.*)*(.*)*(.*)*(.*)*!!!", "(a|a)*(a|a)*$", "[^!]{1,2000000}", "((a{1,999}){1,999}){1,999}", r"\p{L}+", "(?=a)b"),
        *("root ::= root", 'root ::= root "a" | root root', "root ::= undefined", 'root ::= "a"{1,9999999}'),
        *('{"type": "array", "minItems": 9999999}', '{"type": "string", "minLength": 99999999}', '{"$ref": "#"}', '{"type": "nosuch"}'),
        *('{"anyOf": []}', '{"pattern": "(a*)*b", "type": "string"}', '{"type": "integer", "minimum": -1e308, "maximum": 1e308}'),
    )
}
LISTS = {
    **{
        text: text
        for text in ("null", "true", "false", "[]", "{}", "[[]]", "[[[]]]", "[null]", "[{}]", "[true]", "[false]", '[""]', '["a", 1]')
    },
    **{text: text for text in ("[0, -1]", "[2048]", "[1e9]", "[0.5]", "[NaN]", "[[1], [2]]", '[["a"]]', '{"a": 1}', '{"a": {"b": []}}')},
    **{text: text for text in ('{"": null}', '{"0": 1e308}', '{"99999": 1}', '{"-1": 1}', '{"type": "json_schema"}', '{"id": "x"}')},
    **{text: text for text in ('{"5": "x"}', '{"5": null}', '{"5": [1]}')},
    "tool": json.dumps([_tool({"pattern": "(a|a)*b", "type": "string"})]),
    **{text: text for text in ('[{"type": "function", "function": {"name": ""}}]', '[{"role": "user", "content": null}]')},
    "list of 2^63": f"[{2**63}]",
    "nested lists": "[" * 3000 + "]" * 3000,
    "nested objects": '{"a":' * 400 + "1" + "}" * 400,
}
LARGE: Mapping[str, Callable[[], str]] = {
    "a million numbers": lambda: json.dumps([7] * MILLION),
    "a million lists": lambda: json.dumps([[7]] * MILLION),
    "a million texts": lambda: json.dumps(["a"] * MILLION),
    "a million letters": lambda: json.dumps("a" * MILLION),
    "a tool with 20,000 words": lambda: json.dumps([_tool({"enum": [f"word{number}" for number in range(20_000)]})]),
    "100,000 keys": lambda: json.dumps({str(number): 1 for number in range(100_000)}),
}
LONG = {
    "60,000 digits in braces": json.dumps("{" + "1" * 60_000),
    "15,000 blanks, four times": json.dumps((" " * 15_000 + "x") * 4),
    "100,000 blanks": json.dumps(" " * 100_000),
    "blanks around a number": " " * 100_000 + "1" + " " * 100_000,
    "a key of 300 zeros": json.dumps({"0" * 300 + "5": "x"}),
    "300,000 wrong messages": "[" + ",".join(["1"] * 300_000) + "]",
    "a word of 8 MiB": json.dumps("a" * 2**23),
}
"""What took a parser, a pattern or a tokenizer a time that grows faster than the body."""
LONG_CASES = (
    *((GENERATE, f"sampling_params.{name}", value) for name in ("stop_regex", "regex", "stop") for value in list(LONG)[:3]),
    *((GENERATE, name, "blanks around a number") for name in ("sampling_params.n", "sampling_params.temperature", "priority")),
    (GENERATE, "sampling_params.logit_bias", "a key of 300 zeros"),
    *((path, field, "100,000 blanks") for path, field in ((GENERATE, "text"), (COMPLETIONS, "prompt"), ("/tokenize", "prompt"))),
    (CHAT_COMPLETIONS, "messages", "300,000 wrong messages"),
    *((path, field, "a word of 8 MiB") for path, field in ((GENERATE, "text"), (COMPLETIONS, "prompt"), ("/tokenize", "prompt"))),
)
VALUES: dict[str, str] = {**NUMBERS, **WORDS, **GRAMMARS, **LISTS}
"""JSON texts by name. Not all of them are valid."""

BASES: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": [11, 22, 33], "sampling_params": {"max_new_tokens": 4}},
    CHAT_COMPLETIONS: {"model": "default", "messages": [{"role": "user", "content": "alpha"}], "max_tokens": 4},
    COMPLETIONS: {"model": "default", "prompt": "alpha", "max_tokens": 4},
    "/v1/score": {"query": [5], "items": [[6]], "label_token_ids": [7]},
    "/v1/rerank": {"query": "alpha", "documents": ["beta"]},
    "/tokenize": {"prompt": "alpha"},
    "/detokenize": {"tokens": [5, 6]},
    **{path: {"input": "alpha", "model": "default"} for path in ("/v1/classify", "/v1/embeddings")},
    **{path: {"text": "alpha"} for path in ("/classify", "/encode")},
}
PROMPTS = ("text", "input_ids", "input_embeds")
"""Fields of which a body may have one."""
_COMPANION_FIELDS = {
    "sampling_params.min_new_tokens": "2",
    "sampling_params.logit_bias": '{"5": 1}',
    "sampling_params.stop_token_ids": "[7]",
}
"""Fields with which SGLang uses other sampling parameters in further places."""
COMPANIONS = {
    GENERATE: {
        **{
            "return_logprob": "true",
            "stream": "true",
            "top_logprobs_num": "3",
            "sampling_params.n": "3",
            "sampling_params.beam_width": "3",
        },
        **{"sampling_params.min_new_tokens": "2", "sampling_params.max_new_tokens": "200", "sampling_params.regex": '"[a-z]+"'},
        **{"sampling_params.temperature": "0", "sampling_params.stop": '["a"]', "sampling_params.frequency_penalty": "0.5"},
        **_COMPANION_FIELDS,
    },
    CHAT_COMPLETIONS: {"logprobs": "true", "stream": "true", "n": "3", "min_tokens": "2", "max_tokens": "200", "tool_choice": '"required"'},
    COMPLETIONS: {"logprobs": "3", "stream": "true", "n": "3", "min_tokens": "2", "echo": "true", "max_tokens": "200"},
}
"""Valid values of fields that make others effective."""
FORMS: dict[str, Callable[[str], bytes]] = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without mark": lambda text: text.encode("utf-16-le"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "byte order mark": lambda text: text.encode("utf-8-sig"),
    "escaped keys": lambda text: re.sub(r'"([a-z])(\w*":)', lambda key: f'"\\u{ord(key[1]):04x}{key[2]}', text).encode(),
    "twice": lambda text: (text[:-1] + "," + text[1:]).encode(),
    "in a list": lambda text: f"[{text}]".encode(),
    "with an end": lambda text: (text + "]}").encode(),
    "cut": lambda text: text.encode()[:-3],
    "broken UTF-8": lambda text: text.encode().replace(b"a", b"\xff\xc0"),
    "blanks": lambda text: text.replace(":", " \t:\r\n ").encode(),
}
"""Ways to write a body."""


@dataclass(frozen=True)
class Case:
    """A request with changed fields."""

    path: str
    changes: Mapping[str, str] = field(default_factory=dict)
    """Names of values (``VALUES``, ``LARGE``), or their JSON texts, by field."""
    form: str = "plain"

    def body(self) -> bytes:
        """Return the body."""
        text = self._text()
        return text.encode() if self.form == "plain" else FORMS[self.form](text)

    def simpler(self) -> Iterator[Case]:
        """Yield the same case without one of its changes."""
        if self.form != "plain":
            yield replace(self, form="plain")
        for name in self.changes:
            yield replace(self, changes={key: value for key, value in self.changes.items() if key != name})

    def _text(self) -> str:
        base = BASES[self.path]
        fields = {key: json.dumps(value) for key, value in base.items() if key != "sampling_params"}
        if any(name in self.changes for name in PROMPTS):
            fields = {key: text for key, text in fields.items() if key not in PROMPTS}
        inner = {key: json.dumps(value) for key, value in base.get("sampling_params", {}).items()}
        for name, value in self.changes.items():
            outer, _, key = name.rpartition(".")
            (inner if outer else fields)[key] = LARGE[value]() if value in LARGE else LONG.get(value) or VALUES.get(value, value)
        if inner and "sampling_params" not in self.changes:
            fields["sampling_params"] = _object(inner)
        return _object(fields)


def _object(fields: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in fields.items()) + "}"


def long_cases() -> Iterator[Case]:
    """Yield the cases that a linear reader answers at once."""
    yield from (Case(path, {name: value}) for path, name, value in LONG_CASES)


def cases(seed: int, fields: Mapping[str, list[str]]) -> Iterator[Case]:
    """Yield cases without end. Each round has every value of every field once, in another order and with other companions."""
    dice = random.Random(seed)
    singles = [(path, name, value) for path, names in fields.items() for name in names for value in (*VALUES, *LARGE)]
    while True:
        dice.shuffle(singles)
        for path, name, value in singles:
            # Large values take most of the time.
            if value in LARGE and dice.random() < 0.8:
                continue
            companions = COMPANIONS.get(path, {})
            changes = {key: companions[key] for key in dice.sample(sorted(companions), min(dice.randrange(4), len(companions)))}
            if dice.random() < 0.3:
                other = dice.choice(fields[path])
                changes[other] = dice.choice(sorted(VALUES))
            form = dice.choice(sorted(FORMS)) if dice.random() < 0.1 else "plain"
            yield Case(path, {**changes, name: value}, form)


def sampling_cases(fields: list[str], combined_every: int = 1) -> Iterator[Case]:
    """Yield each value of each sampling parameter of ``/generate`` alone, and then with the companions that make SGLang use it.

    Args:
        fields: Fields of ``/generate``.
        combined_every: Yield only each such number of the cases with companions.
    """
    values = [(name, value) for name in fields if name.startswith("sampling_params.") for value in VALUES]
    yield from (Case(GENERATE, {"sampling_params": value}) for value in VALUES)
    yield from (Case(GENERATE, {name: value}) for name, value in values)
    yield from (Case(GENERATE, {**_COMPANION_FIELDS, name: value}) for name, value in values[::combined_every])
