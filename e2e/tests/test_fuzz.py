"""The cases of the fuzzer."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from e2e.fuzz.__main__ import contains
from e2e.fuzz.cases import BASES, FORMS, LARGE, VALUES, Case, cases, sampling_cases
from e2e.fuzz.fields import CLASSES, body_fields
from e2e.fuzz.run import groups
from sglang_rollout.sglang.api import DATA_PATHS, GENERATE


def test_a_case_replaces_and_adds_fields() -> None:
    case = Case(GENERATE, {"sampling_params.n": "2^31", "stream": "true", "text": "NUL"})
    assert json.loads(case.body()) == {"stream": True, "text": "a\0b", "sampling_params": {"max_new_tokens": 4, "n": 2**31}}
    assert json.loads(Case(GENERATE, {"sampling_params": "null"}).body()) == {"input_ids": [11, 22, 33], "sampling_params": None}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_writes_another_body(form: str) -> None:
    plain = Case(GENERATE, {"sampling_params.n": "3"})
    assert Case(GENERATE, plain.changes, form).body() != plain.body()


def test_escaped_keys_mean_the_same() -> None:
    case = Case(GENERATE, {"sampling_params.n": "3"}, "escaped keys")
    assert b'"input_ids"' not in case.body()
    assert json.loads(case.body()) == json.loads(Case(GENERATE, case.changes).body())


def test_a_seed_determines_the_cases_and_a_round_has_every_value() -> None:
    fields = {GENERATE: ["text", "sampling_params.n"], "/tokenize": ["prompt"]}
    size = 3 * len(VALUES)
    assert list(islice(cases(7, fields), size)) == list(islice(cases(7, fields), size))
    seen = {(case.path, name, value) for case in islice(cases(7, fields), size + 3 * len(LARGE)) for name, value in case.changes.items()}
    assert {(path, name, value) for path, names in fields.items() for name in names for value in VALUES} <= seen


def test_each_value_of_a_sampling_parameter_is_sent_alone_and_with_companions() -> None:
    fields, number = ["text", "sampling_params", "sampling_params.n"], len(VALUES)
    found = list(sampling_cases(fields))
    assert len(found) == 3 * number
    assert found[number : 2 * number] == [Case(GENERATE, {"sampling_params.n": value}) for value in VALUES]
    combined = json.loads(found[2 * number].body())["sampling_params"]
    assert combined == {"max_new_tokens": 4, "min_new_tokens": 2, "logit_bias": {"5": 1}, "stop_token_ids": [7], "n": 0}
    assert list(sampling_cases(fields, number)) == found[: 2 * number + 1]


def test_a_simpler_case_has_one_change_less() -> None:
    case = Case(GENERATE, {"stream": "true", "text": "NUL"}, "UTF-16")
    simpler = [Case(GENERATE, case.changes), Case(GENERATE, {"text": "NUL"}, "UTF-16"), Case(GENERATE, {"stream": "true"}, "UTF-16")]
    assert list(case.simpler()) == simpler
    assert contains(case, Case(GENERATE, {"text": "NUL"}))
    assert not contains(case, Case(GENERATE, {"text": "a"}))


def test_fields_come_from_the_source_of_sglang(tmp_path: Path) -> None:
    sources = {"sampling/sampling_params.py": {"SamplingParams"}}
    for file, name in CLASSES.values():
        sources.setdefault(file, set()).add(name)
    for file, names in sources.items():
        classes = [f"class {name}(Base):\n    own: int = 1\n    sampling_params: dict\n    plain = 2\n" for name in sorted(names)]
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("class Base:\n    inherited: str\n" + "".join(classes))
    sampling = ["sampling_params.inherited", "sampling_params.own", "sampling_params.sampling_params"]
    assert body_fields(tmp_path)[GENERATE] == ["inherited", "own", "sampling_params", *sampling]


def test_every_data_path_has_fields_and_a_body() -> None:
    same = {"/v1/tokenize", "/v1/detokenize"}
    assert CLASSES.keys() == BASES.keys() == set(DATA_PATHS) - same


def test_groups_hold_all_cases() -> None:
    made = [Case(GENERATE, {"text": str(number)}) for number in range(10)]
    assert [len(group) for group in groups(made, 4)] == [4, 4, 2]
