"""``n`` samples per prompt: the arguments that are accepted, the requests that are sent, and the replies that are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sglang_rollout.testing import StandIn, expected_tokens
from sglang_rollout.trainer import MAX_SAMPLES_PER_PROMPT, Fleet, GenerateFailed, connect, connect_engine
from tests.unit.trainer.support.scripted_fleet import FakeFleet

GREEDY = {"temperature": 0, "max_new_tokens": 3}


@pytest.fixture
def fleet(fake: FakeFleet) -> Iterator[Fleet]:
    with connect(fake.url, timeout=5) as made:
        yield made


def test_samples_are_returned_in_order() -> None:
    prompts = [[4, 5], [6], [7, 8]]
    with StandIn() as engine, connect_engine(engine.url) as fleet:
        wanted = [expected_tokens(engine.tensors(), prompt, 3) for prompt in prompts]
        for how in ({"n": 4, "sampling_params": GREEDY}, {"sampling_params": GREEDY | {"n": 4}}, {"n": 4, "sampling_params": [GREEDY] * 3}):
            samples = fleet.generate(input_ids=prompts, **how)
            assert [(each.prompt_index, each.sample_index) for each in samples] == [(i, k) for i in range(3) for k in range(4)]
            assert [each.output_ids for each in samples] == [tokens for tokens in wanted for _ in range(4)]
            assert [each.prompt for each in samples[::4]] == prompts
        mixed = fleet.generate(["a", "b"], sampling_params=[GREEDY | {"n": 2}, GREEDY], return_logprob=True)
    assert [(each.prompt_index, each.sample_index, len(each.logprobs or [])) for each in mixed] == [(0, 0, 3), (0, 1, 3), (1, 0, 3)]


def test_n_is_part_of_the_sampling_parameters(fake: FakeFleet, fleet: Fleet) -> None:
    sample = {"text": "x", "output_ids": [1], "meta_info": {}}
    fake.replies["/generate"] = lambda body: (200, [sample] * body["sampling_params"]["n"])
    assert len(fleet.generate(["p"], n=np.int64(2), sampling_params={"n": 2, "top_p": 0.5})) == 2  # type: ignore[arg-type]
    assert fake.calls[-1][1] == {"text": "p", "sampling_params": {"n": 2, "top_p": 0.5}, "return_logprob": False}
    fake.replies["/generate"] = (200, sample)
    assert len(fleet.generate(["p"], n=1, sampling_params={"n": None})) == 1
    assert len(fleet.generate(["p"], n=3, sampling_params={"beam_width": 4})) == 1, "SGLang puts the beams into one sample"
    assert fake.calls[-1][1]["sampling_params"] == {"beam_width": 4, "n": 3}


@pytest.mark.parametrize(
    ("n", "reply", "message"),
    [
        (4, [{"meta_info": {}}] * 3, r"the reply is a list of 3, not a list of 4 samples with meta_info: HTTP 200 '\[{\"meta_info"),
        (4, {"meta_info": {}, "text": "one"}, "the reply is something else, not a list of 4 samples"),
        (1, [{"meta_info": {}}] * 2, "the reply is a list of 2, not 1 sample"),
        (1, {"hello": "world"}, r"not 1 sample with meta_info: HTTP 200 '{\"hello\": \"world\"}'"),
        (1, "Model is loading", "HTTP 200 '\"Model is loading\"'"),
        (2, [{"meta_info": {}}, {"meta_info": {"weight_versions": [{"from": 1}]}}], r"not as SGLang writes it \(KeyError\('version'\)\)"),
    ],
)
def test_a_reply_of_another_shape_is_an_error(fake: FakeFleet, fleet: Fleet, n: int, reply: Any, message: str) -> None:
    fake.replies["/generate"] = (200, reply)
    with pytest.raises(GenerateFailed, match=message) as raised:
        fleet.generate(["p"], n=n)
    assert [each.prompt_index for each in raised.value.failed] == [0]
    assert fake.counts["/generate"] == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"n": 0}, ValueError, "n is 0; expected 1 to 1024 samples per prompt"),
        ({"n": -1}, ValueError, "n is -1; expected 1 to 1024"),
        ({"n": 10**6}, ValueError, r"n is 1000000; expected 1 to 1024 .* To get more, repeat the prompt"),
        ({"n": "4"}, TypeError, r"n is '4' \(str\); expected an integer"),
        ({"n": True}, TypeError, "n is True; expected an integer"),
        ({"n": 4.0}, TypeError, r"n is 4.0 \(float\)"),
        ({"sampling_params": {"n": 0}}, ValueError, r"sampling_params\['n'\] is 0"),
        ({"sampling_params": [{}, {"n": "4"}]}, TypeError, r"sampling_params\[1\]\['n'\] is '4'"),
        ({"n": 4, "sampling_params": {"n": 8}}, ValueError, "n=4, but sampling_params has n=8. Give one of them"),
        ({"n": 4, "sampling_params": [{}, {"n": 1}]}, ValueError, r"n=4, but sampling_params\[1\] has n=1"),
        ({"sampling_params": "greedy"}, TypeError, r"sampling_params is 'greedy' \(str\); expected a mapping"),
        ({"sampling_params": 7}, TypeError, r"sampling_params is 7 \(int\)"),
        ({"sampling_params": [{}, "x"]}, TypeError, r"sampling_params\[1\] is 'x' \(str\)"),
        ({"sampling_params": {"temperature": float("nan")}}, ValueError, "sampling_params cannot be sent as JSON: Out of range float"),
        ({"prompts": "one text"}, TypeError, r"prompts is 'one text' \(str\); expected a list"),
        ({"prompts": ["a", 7]}, TypeError, r"prompts\[1\] is 7 \(int\); expected a text"),
        ({"prompts": None, "input_ids": [5, 6]}, TypeError, r"input_ids\[0\] is 5 \(int\); expected a list of integer token ids"),
        ({"concurrency": 0}, ValueError, "concurrency is 0; expected at least 1"),
    ],
)
def test_wrong_arguments_reach_no_engine(
    fake: FakeFleet, fleet: Fleet, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fleet.generate(**{"prompts": ["p", "q"], **arguments})
    assert fake.counts["/generate"] == 0


def test_the_maximum_of_samples_is_accepted(fake: FakeFleet, fleet: Fleet) -> None:
    fake.replies["/generate"] = lambda body: (200, [{"meta_info": {}}] * body["sampling_params"]["n"])
    assert fleet.generate(["p"], n=MAX_SAMPLES_PER_PROMPT)[-1].sample_index == 1023
