"""A fleet under attack: the pods of the attackers, another rollout, and what they send."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from e2e import machine_token, stand_in
from e2e.cases.security.attacks import ATTACKS, LINK, OTHER_ROLLOUT, OUTSIDE, PATHS, Attack, Host, Request, Source
from e2e.cases.security.callers import ELSEWHERE, Answer, account_token, change_security, reach, report, reported_pod, send
from e2e.cases.security.reach import send_all
from e2e.cases.stand_in_rollout import StandInRollout
from e2e.kube import Kubectl, eventually
from sglang_rollout.controller.render import names
from sglang_rollout.wire.ports import FLEET, FRONT_PORT

ATTACKER, HOST_ATTACKER = "attacker", "host-attacker"
_REPORTED = "reported"
_FOLDERS = f"mkdir -p {PATHS} {OUTSIDE} && ln -sfn {OUTSIDE} {PATHS}/{LINK}"
_WITHOUT_END_SECONDS = 90.0
"""Time for the answer to a body that does not end. Gates wait 60 s."""
OTHER_SECRET, OTHER_TOKEN = "other-token", "token-of-another-rollout"


def other_rollout() -> dict[str, Any]:
    """Return a rollout of one stand-in with ``mode: Hybrid``, whose trainer is the attacker's pod."""
    document = stand_in.rollout(OTHER_ROLLOUT, replicas=1)
    document["spec"] |= {
        "mode": "Hybrid",
        "sharing": {"trainerLabels": {"app": ATTACKER}},
        "security": {"token": {"secretName": OTHER_SECRET}},
    }
    return document


def other_secret() -> dict[str, Any]:
    """Return the Secret with the token of the other rollout."""
    return machine_token.secret() | {"metadata": {"name": OTHER_SECRET}, "stringData": {"token": OTHER_TOKEN}}


@dataclass
class Scene:
    """The attacked fleet. The attacks of one source are sent at the same time, when the first of their answers is asked for."""

    stand: StandInRollout
    outsider: str
    hosts: dict[Host, str]
    """Addresses."""
    words: dict[str, str]
    """Values of the placeholders in headers."""
    before: dict[str, Any]
    """``GET /fleet`` before the attacks."""
    _answers: dict[Source, dict[Attack, list[Answer]]] = field(default_factory=dict)

    @property
    def kubectl(self) -> Kubectl:
        """Kubectl for the namespace of the fleet."""
        return self.stand.kubectl

    def answers(self, attack: Attack) -> list[Answer]:
        """Return the answer to each request of an attack."""
        if attack.source not in self._answers:
            self._answers[attack.source] = self._send_from(attack.source)
        return self._answers[attack.source][attack]

    def _send_from(self, source: Source) -> dict[Attack, list[Answer]]:
        attacks = [attack for attack in ATTACKS if attack.source is source]
        requests = [self.message(request, source) for attack in attacks for request in attack.requests()]
        with self._prepared(source):
            answers = iter(self._send(source, requests))
        return {attack: [next(answers) for _ in attack.requests()] for attack in attacks}

    def _send(self, source: Source, requests: list[dict[str, Any]]) -> list[Answer]:
        """Send requests from the pod of a source, or from this machine."""
        match source:
            case Source.FORWARD:
                return send_all(requests, 20)
            case Source.TRAINER:
                return send(self.kubectl, "trainer", requests, container="trainer")
            case Source.ENGINE:
                return send(self.kubectl, f"{self.stand.engine(0)}-0", requests, container="engine")
            case Source.OTHER_ENGINE:
                return send(self.kubectl, f"{OTHER_ROLLOUT}-engine-0-0", requests, container="engine")
            case Source.HYBRID_TRAINER:
                return send(self.kubectl, ATTACKER, requests, seconds=_WITHOUT_END_SECONDS)
            case Source.NOT_SELECTED | Source.SHARED_ADDRESS | Source.SECOND_TRAINER:
                return send(self.kubectl, ATTACKER, requests)
            case Source.HOST_NETWORK:
                return send(self.kubectl, HOST_ATTACKER, requests)
            case Source.OTHER_NAMESPACE | Source.ENDED_POD | Source.DELETED_POD:
                return send(ELSEWHERE, self.outsider, requests)

    @contextlib.contextmanager
    def _prepared(self, source: Source) -> Iterator[None]:
        """Give the attacker of a source its circumstances for the length of the block."""
        match source:
            case Source.NOT_SELECTED:
                change_security(self.kubectl, self.stand.name, trainers={"podSelector": {"matchLabels": {"app": "trainer"}}})
                self._wait_for(self.kubectl, ATTACKER, 403)
                yield
                change_security(self.kubectl, self.stand.name)
                self._wait_for(self.kubectl, ATTACKER, 200)
            case Source.TRAINER:
                change_security(self.kubectl, self.stand.name, paths=[PATHS])
                self.kubectl.exec("trainer", "sh", "-c", _FOLDERS, container="trainer")
                eventually("security.paths has an effect", self._limits_paths, within=60)
                yield
                change_security(self.kubectl, self.stand.name)
            case Source.SECOND_TRAINER:
                self._call_as_trainer("/pause_generation")
                yield
                self._call_as_trainer("/continue_generation")
            case Source.ENDED_POD:
                with self._reported_at(ELSEWHERE, self.outsider, 200):
                    report(self.kubectl, _REPORTED, phase="Succeeded")
                    self._wait_for(ELSEWHERE, self.outsider, 403)
                    yield
            case Source.DELETED_POD:
                with self._reported_at(ELSEWHERE, self.outsider, 200):
                    pass
                self._wait_for(ELSEWHERE, self.outsider, 403)
                yield
            case Source.SHARED_ADDRESS:
                with self._reported_at(self.kubectl, ATTACKER, 403):
                    yield
            case _:
                yield

    def _call_as_trainer(self, path: str) -> None:
        """Make a call from the trainer's pod, which must succeed."""
        request = Request(Host.ROUTER_SERVICE, FRONT_PORT, "POST", path, body={"mode": "retract"})
        ((status, _, message),) = self._send(Source.TRAINER, [self.message(request, Source.TRAINER)])
        assert status == 200, message

    @contextlib.contextmanager
    def _reported_at(self, kubectl: Kubectl, pod: str, status: int) -> Iterator[None]:
        """Let a pod of the fleet's namespace report the address of ``pod``, and wait until ``pod`` gets this status."""
        with reported_pod(self.kubectl, _REPORTED, address_of(kubectl, pod)):
            self._wait_for(kubectl, pod, status)
            yield

    def _wait_for(self, kubectl: Kubectl, pod: str, status: int) -> None:
        """Wait until a pod gets this status for ``GET /fleet``."""
        url = f"http://{self.hosts[Host.ROUTER_SERVICE]}:{FRONT_PORT}{FLEET}"
        eventually(f"{pod} gets {status}", lambda: reach(kubectl, pod, url, seconds=20) == [status], within=60)

    def _limits_paths(self) -> bool:
        """Return whether a checkpoint outside of ``security.paths`` is refused because of it."""
        request = Request(Host.ROUTER_SERVICE, FRONT_PORT, "POST", "/update_weights_from_disk", body={"model_path": OUTSIDE})
        ((_, _, message),) = self._send(Source.TRAINER, [self.message(request, Source.TRAINER)])
        return "security.paths" in message

    def message(self, request: Request, source: Source) -> dict[str, Any]:
        """Return a request as ``reach.py`` takes it."""
        address = f"{self.hosts[request.host]}:{request.port}"
        if source is Source.FORWARD:
            address = self.stand.url.removeprefix("http://")
        headers = {name: value.format(**self.words) for name, value in request.headers.items()}
        words = {"{router}": self.hosts[Host.ROUTER_POD]}
        body = {name: words.get(str(value), value) for name, value in request.body.items()}
        return {**asdict(request), "address": address, "headers": headers, "body": body}


def find_hosts(kubectl: Kubectl, stand: StandInRollout, router: str) -> dict[Host, str]:
    """Return the address of each host. The engine pod is another than the one from which attacks are sent."""
    return {
        Host.ROUTER_SERVICE: kubectl.get("service", f"{stand.name}-router")["spec"]["clusterIP"],
        Host.GENERATE_SERVICE: kubectl.get("service", f"{stand.name}-generate")["spec"]["clusterIP"],
        Host.ROUTER_POD: address_of(kubectl, router),
        Host.ENGINE_POD: address_of(kubectl, f"{stand.engine(1)}-0"),
        Host.HYBRID_ENGINE: address_of(kubectl, f"{OTHER_ROLLOUT}-engine-0-0"),
        Host.OWN_POD: "127.0.0.1",
    }


def find_words(kubectl: Kubectl, stand: StandInRollout) -> dict[str, str]:
    """Return the values of the placeholders in headers."""
    engine = f"{stand.engine(0)}-0"
    return {
        "trainer": address_of(kubectl, "trainer"),
        "token": OTHER_TOKEN,
        "control": secret_value(kubectl, names.control_name(OTHER_ROLLOUT), names.TOKEN_KEY),
        "credential": secret_value(kubectl, names.credentials_name(stand.name), stand.engine(0)),
        "foreign": account_token(kubectl, OTHER_ROLLOUT, "default", "trainer"),
        "unbound": account_token(kubectl, stand.name, "default"),
        "engine": account_token(kubectl, stand.name, kubectl.get("pod", engine)["spec"]["serviceAccountName"], engine),
    }


def secret_value(kubectl: Kubectl, name: str, key: str) -> str:
    """Return one value of a Secret."""
    return base64.b64decode(kubectl.get("secret", name)["data"][key]).decode()


def address_of(kubectl: Kubectl, pod: str) -> str:
    """Return the address of a pod."""
    return str(kubectl.get("pod", pod)["status"]["podIP"])
