"""Calls of existing trainers, unmodified: each trainer commits once per update, at the call that ends its update.

A trainer gets its answers in SGLang's shape, every engine then generates the new weights' tokens, and a client that asks all the
time sees no tokens of another version than the label says, and none of the old version in an answer that began after the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import requests
from e2e.chaos.tokens import FEW, PROMPT, known
from e2e.chaos.watch import Watch
from e2e.engine import LabError, environment

from tests.contract.support.plugin_requests import code_in
from tests.contract.support.trainer_dialects import Fleet, Trainer, fleet, has_sglangs_shape, trainer

pytestmark = [pytest.mark.engine, pytest.mark.router, pytest.mark.timeout(600)]

CONTINUE, FLUSH, END, DESTROY = "/continue_generation", "/flush_cache", "/end_weight_update", "/destroy_weights_update_group"


def torchrl_first(t: Trainer, scale: float, version: str) -> None:
    """TorchRL's first SGLang port: world size from /server_info, no group name, one tensor per call in the singular."""
    if not t.commits:
        assert t.call("GET", "/health").ok
        assert "model_path" in t.get("/model_info")
        t.open(t.world())
    for name in t.fleet.names:
        t.send(scale, [name], single=True)
    t.post(FLUSH)


def torchrl(t: Trainer, scale: float, version: str) -> None:
    """TorchRL 0.14: pause by retraction, poll the load, one call for all tensors, no version, continue."""
    group = "weight_update_group_1f2e3d4c"
    if not t.commits:
        assert t.call("GET", "/health").ok
        t.open(t.world(), group=group, group_name=group)
    t.post("/pause_generation", {"mode": "retract"})
    assert sum(load.get("num_running_reqs", load["num_reqs"] - load["num_waiting_reqs"]) for load in t.get("/get_load")) >= 0
    assert t.send(scale, t.fleet.names, group_name=group, flush_cache=False, abort_all_requests=False)["success"] is True
    t.post(CONTINUE, {"torch_empty_cache": True})


def skyrl(t: Trainer, scale: float, version: str) -> None:
    """SkyRL up to 0.4: a named group, updates that do not name it, one tensor per call, no pause; flush ends the update."""
    if not t.commits:
        t.open(1 + t.fleet.ranks, group="skyrl", group_name="skyrl", backend="gloo")
    for name in t.fleet.names:
        t.send(scale, [name], single=True)
    t.post(FLUSH)


def slime(t: Trainer, scale: float, version: str) -> None:
    """slime: a group for each pipeline stage, from as many processes; flush before the buckets; versions; continue."""
    if not t.commits:
        info = t.get("/get_server_info")
        assert (info["num_gpus"], info["enable_memory_saver"], info["disaggregation_mode"]) == (t.fleet.ranks, False, "null")
        assert t.call("POST", "/workers", {"url": t.fleet.url, "worker_type": "regular"}).status_code == 202
        for rank in range(2):
            t.open(1 + info["num_gpus"], group=f"slime-pp_{rank}", who=rank, group_name=f"slime-pp_{rank}", backend="gloo")
    t.post("/pause_generation", {})
    t.get(FLUSH)
    for rank, stage in enumerate(t.buckets()):
        for names in (stage[:3], stage[3:]):
            t.send(scale, names, who=rank, group_name=f"slime-pp_{rank}", flush_cache=False, weight_version=version)
    t.post(CONTINUE, {})


def until_flushed(t: Trainer) -> None:
    """Some trainers repeat the flush forever, because an engine refuses it while requests run."""
    while not t.call("GET", FLUSH).ok:
        assert t.call("GET", "/health").ok


def miles(t: Trainer, scale: float, version: str) -> None:
    """miles: closes its group before it opens it, a session with a selector, the version once more before the end."""
    if not t.commits:
        assert t.call("GET", "/health_generate").ok
        until_flushed(t)
        assert t.call("POST", DESTROY, {"group_name": "miles-pp_0"}).status_code == 400
        t.open(1 + t.fleet.ranks, group="miles-pp_0", group_name="miles-pp_0", backend="gloo")
    t.post("/pause_generation", {"mode": "retract"})
    t.get(FLUSH)
    t.post("/begin_weight_update", {"selector": "all"})
    for names in t.buckets(3):
        t.send(scale, names, group_name="miles-pp_0", selector="all", flush_cache=False, weight_version=version)
    t.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
    t.post(END, {})
    t.post(CONTINUE, {})


def areal(t: Trainer, scale: float, version: str) -> None:
    """AReaL: ports as text, a group for each stage with a field of its own, requests aborted with every chunk, no version."""
    if not t.commits:
        assert t.call("GET", "/health", {}).ok
        for stage in range(2):
            name = f"update_weight_group_{stage}"
            t.open(1 + t.fleet.ranks, group=name, who=stage, text_port=True, group_name=name, backend="gloo", pp_rank=stage)
    t.post("/pause_generation", {})
    for stage, names in enumerate(t.buckets()):
        t.send(scale, names, who=stage, group_name=f"update_weight_group_{stage}", abort_all_requests=True)
    t.post(CONTINUE, {})


def roll(t: Trainer, scale: float, version: str) -> None:
    """ROLL: no pause, buckets that do not flush, a flush with an empty object."""
    if not t.commits:
        t.open(1 + t.fleet.ranks, group="roll_0_0", group_name="roll_0_0", backend="gloo")
    for names in t.buckets():
        assert t.send(scale, names, group_name="roll_0_0", flush_cache=False)["success"] is True
    t.post(FLUSH, {})


def session(t: Trainer, scale: float, version: str) -> None:
    """Begin and end with a version and flattened buckets and without a pause, as our own client and those modelled on TRL's do."""
    if not t.commits:
        t.open(t.get("/get_world_size")["world_size"] + 1, group="session", how="stateless", group_name="session")
    t.post("/begin_weight_update", {})
    for names in t.buckets(3):
        t.send(scale, names, flat=True, group_name="session", load_format="flattened_bucket", weight_version=int(version))
    t.post(END, {})


def bare_session(t: Trainer, scale: float, version: str) -> None:
    """The same with calls that have no body at all, and a pause around it."""
    if not t.commits:
        t.open(1 + t.fleet.ranks, group="bare", group_name="bare")
    t.post("/pause_generation")
    t.post("/begin_weight_update")
    for names in t.buckets():
        t.send(scale, names)
    t.post(END)
    t.post(CONTINUE)


def in_place(t: Trainer, scale: float, version: str) -> None:
    """Pauses in place and lets SGLang's default flush with every bucket."""
    if not t.commits:
        t.open(1 + t.fleet.ranks, group="in-place", group_name="in-place")
    t.post("/pause_generation", {"mode": "in_place"})
    for names in t.buckets():
        t.send(scale, names, group_name="in-place", weight_version=version)
    t.post(CONTINUE, {})


def group_for_each(t: Trainer, scale: float, version: str) -> None:
    """A group for each update, closed after it without its name: there is no other call that could mean the end."""
    name = f"once-{version}"
    t.open(1 + t.fleet.ranks, group=name, group_name=name)
    t.send(scale, t.fleet.names, group_name=name)
    t.post(DESTROY)


@dataclass(frozen=True)
class Dialect:
    """The calls of one update, and the call that commits it."""

    push: Callable[[Trainer, float, str], None]
    commits: str
    processes: int = 1
    alone: bool = False
    """Real engines get no other requests: an engine with running requests keeps the results of the old weights in its cache."""


def clients(lab: Fleet, dialect: Dialect) -> int:
    """Return the number of clients during the trainer's push."""
    return 0 if dialect.alone and lab.kind.startswith("sglang") else 1


DIALECTS = [
    Dialect(torchrl_first, FLUSH),
    Dialect(torchrl, CONTINUE),
    Dialect(skyrl, FLUSH),
    Dialect(slime, CONTINUE, processes=2),
    Dialect(miles, END),
    Dialect(areal, CONTINUE, processes=2),
    Dialect(roll, FLUSH),
    Dialect(session, END),
    Dialect(bare_session, END),
    Dialect(in_place, CONTINUE, alone=True),
    Dialect(group_for_each, DESTROY),
]


EACH_WAY = [dialect for dialect in DIALECTS if dialect.push in (torchrl_first, slime, miles, in_place, group_for_each)]
"""Each call that commits, with and without a session, and the pause in which a flush fails, which ends an old engine."""


@pytest.fixture(scope="module", params=["stand-in", "sglang"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    try:
        environment.python(make=False)
    except LabError as error:
        pytest.skip(str(error))
    with fleet(request.param, tmp_path_factory.mktemp("dialects")) as made:
        yield made


def close_groups(lab: Fleet) -> None:
    for group in lab.document()["groups"]:
        with suppress(requests.RequestException):
            requests.post(f"{lab.url}{DESTROY}", json={"group_name": group["name"]}, timeout=30)


@contextmanager
def asking(watch: Watch, clients: int) -> Iterator[None]:
    watch.start(*[FEW] * clients)
    try:
        yield
    finally:
        watch.stop()


@pytest.mark.parametrize("lab", ["stand-in", "sglang", "staged", pytest.param("sglang-staged", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.push.__name__)
def test_a_trainer_commits_once_per_update_and_at_the_right_call(lab: Fleet, dialect: Dialect) -> None:
    before = lab.committed()
    tokens, label = lab.generate()
    watch = Watch(lab.url, {label: known(tokens)})
    with trainer(lab, dialect.processes) as made, asking(watch, clients(lab, dialect)):
        for number, scale in enumerate(lab.others(), 1):
            version = str(before["step"] + number)
            watch.expected[version] = known(lab.expected[scale])
            dialect.push(made, scale, version)
            watch.committed(version)
            assert made.commits == [dialect.commits] * number
            assert lab.committed() == {"run": max(before["run"], 1), "step": int(version), "label": version}
            assert lab.everywhere() == [(lab.expected[scale], version)] * 3
        answered = watch.answers
        lab.serving(2, 10)
        assert [path for path, reply in made.answers if not has_sglangs_shape(path, reply)] == []
        while watch.answers < answered + 3 * clients(lab, dialect):  # the test's timeout ends it
            assert lab.document()
        close_groups(lab)
    assert watch.violations == []


@pytest.mark.parametrize(
    "lab",
    [
        *("old", "mixed", pytest.param("sglang-old", marks=pytest.mark.long), "sglang-mixed"),
        *("staged-mixed", pytest.param("sglang-staged-mixed", marks=pytest.mark.long)),
    ],
    indirect=True,
)
@pytest.mark.parametrize("dialect", EACH_WAY, ids=lambda dialect: dialect.push.__name__)
def test_engines_without_sessions_take_part(lab: Fleet, dialect: Dialect) -> None:
    """All engines have SGLang 0.5.20, or one of them has."""
    version, scale, (tokens, label) = str(lab.committed()["step"] + 1), lab.others()[0], lab.generate()
    watch = Watch(lab.url, {label: known(tokens), version: known(lab.expected[scale])})
    with trainer(lab, dialect.processes) as made, asking(watch, clients(lab, dialect)):
        dialect.push(made, scale, version)
        watch.committed(version)
        assert made.commits == [dialect.commits]
        assert lab.everywhere() == [(lab.expected[scale], version)] * 3
        assert [path for path, reply in made.answers if not has_sglangs_shape(path, reply)] == []
        close_groups(lab)
    assert watch.violations == []


@pytest.mark.parametrize("lab", ["staged", pytest.param("sglang-staged", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.push.__name__)
def test_a_trainer_does_not_notice_that_an_engine_is_killed_and_restarted(lab: Fleet, dialect: Dialect) -> None:
    push_around_a_restart(lab, dialect)


@pytest.mark.parametrize("lab", ["sglang-staged"], indirect=True)
@pytest.mark.parametrize("dialect", [d for d in DIALECTS if d.push in (skyrl, areal)], ids=lambda dialect: dialect.push.__name__)
def test_a_trainer_does_not_notice_that_a_real_engine_is_killed_and_restarted(lab: Fleet, dialect: Dialect) -> None:
    """In each run: a trainer that flushes after one process group, and one that continues after two."""
    push_around_a_restart(lab, dialect)


def push_around_a_restart(lab: Fleet, dialect: Dialect) -> None:
    """Push four versions with transport Staged: the third while one engine is away, and the fourth when it is back."""
    sent: list[list[tuple[str, int]]] = []
    with trainer(lab, dialect.processes) as made:

        def push() -> None:
            scale, version, began = lab.others()[0], str(lab.committed()["step"] + 1), len(made.answers)
            dialect.push(made, scale, version)
            sent.append([(path, reply.status_code) for path, reply in made.answers[began:]])
            assert lab.committed()["label"] == version
            assert lab.generate() == (lab.expected[scale], version)

        push()
        push()
        lab.engines[1].kill()
        lab.serving(1, 60)
        push()
        lab.engines[1].start()
        lab.engines[1].wait()
        lab.serving(2, 60)
        push()
        lab.serving(2, 60)
        assert lab.everywhere() == [lab.generate()] * 3
        assert sent[1] == sent[2] == sent[3], "the trainer sends the same calls and gets the same answers"
        close_groups(lab)


def test_handles_of_gpu_memory_from_verl_are_refused(lab: Fleet) -> None:
    """The adapter sends handles that only a process on the same GPU can read. It can still generate after the refusal."""
    before, tokens = lab.committed(), lab.generate()
    with trainer(lab, 0) as t:
        assert t.get("/v1/models")["data"]
        until_flushed(t)
        assert t.call("POST", "/abort_request", {"rid": "", "abort_all": True}).ok
        body = {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket", "flush_cache": False}
        reply = t.call("POST", "/update_weights_from_tensor", body)
        assert (reply.status_code, "belongs to the GPUs of one process" in reply.reason) == (501, True)
        reply = t.call("POST", "/release_memory_occupation", {"tags": ["weights"]})
        assert (reply.status_code, "without --enable-memory-saver" in reply.reason) == (409, True)
        assert t.call("POST", "/resume_memory_occupation", {"tags": ["weights"]}).ok
    assert (lab.committed(), lab.generate()) == (before, tokens)


def test_an_update_without_one_of_its_stages_is_not_committed(lab: Fleet) -> None:
    """The stages of a pipeline send one update together: without one stage the engines hold a mixture."""
    with trainer(lab, 2) as made:
        first, second = lab.others()
        slime(made, first, str(lab.committed()["step"] + 1))
        before = lab.committed()
        made.post("/pause_generation", {})
        made.send(second, made.buckets()[0], who=0, group_name="slime-pp_0", weight_version=str(before["step"] + 1))
        reply = made.call("POST", CONTINUE, {})
        assert (reply.status_code, "group slime-pp_1 sent no tensors" in reply.reason) == (400, True), reply.text
        assert lab.committed() == before
        refused = requests.post(f"{lab.url}/generate", json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}, timeout=30)
        assert refused.status_code == 503
        version = str(before["step"] + 2)
        slime(made, second, version)
        assert lab.everywhere() == [(lab.expected[second], version)] * 3
        close_groups(lab)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [4, 99999]}),
        ("/generate", {"input_ids": [[4], [99999], [5]]}),
        ("/generate", {"input_ids": [[4], [5]], "sampling_params": [{}, {"min_new_tokens": 2, "stop_token_ids": [99999]}]}),
        ("/generate", {"input_ids": [4] * 30000 + [-1] + [4] * 30000}),
        ("/generate", {"text": ""}),
        ("/v1/completions", {"model": "default", "prompt": [4, 99999], "max_tokens": 1}),
    ],
)
def test_a_request_that_would_end_an_engine_is_refused_with_the_reason(lab: Fleet, path: str, body: dict[str, object]) -> None:
    before = lab.everywhere()
    reply = requests.post(lab.url + path, json=body, timeout=60)
    assert (reply.status_code, code_in(reply.json())) == (400, "would_end_the_engine"), reply.text
    assert lab.everywhere() == before
    assert lab.document()["serving"] == 2


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
def test_an_abort_at_each_worker_of_the_router_ends_the_requests_of_all_engines(lab: Fleet, path: str) -> None:
    """slime and miles list the workers at the end of a rollout, and repeat the abort at each worker until it succeeds."""
    before = lab.everywhere()
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    # Different prompts, because smg sends equal ones to one engine.
    bodies = [{"input_ids": [100 * number + 7, *PROMPT], "sampling_params": sampling} for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(requests.post, f"{lab.url}/generate", json=body, timeout=120) for body in bodies]
        with trainer(lab, 0) as t:
            while min(load["num_running_reqs"] for load in t.get("/get_load")) == 0:  # the test's timeout ends it
                assert not any(each.done() for each in running)
            found = t.get(path)
            workers = found["urls"] if "urls" in found else [worker["url"] for worker in found["workers"]]
            replies = [requests.post(f"{url}/abort_request", json={"abort_all": True}, timeout=30) for url in workers]
        assert [reply.status_code for reply in replies] == [200] * len(workers)
        reasons = [each.result(60).json()["meta_info"]["finish_reason"]["type"] for each in running]
    assert reasons == ["abort"] * 8
    assert lab.everywhere() == before
