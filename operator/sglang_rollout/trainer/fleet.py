"""The fleet behind one URL, as a trainer sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import ValidationError

from sglang_rollout.trainer.client import Http
from sglang_rollout.trainer.errors import FleetError, FleetUnreachable, GroupFailed, PushFailed
from sglang_rollout.trainer.generate import Sample, SamplingParams, generate
from sglang_rollout.trainer.heartbeat import Heartbeat
from sglang_rollout.trainer.meeting import destroy, meet, own_address
from sglang_rollout.trainer.push import BLAME_SECONDS, DEFAULT_BUCKET_BYTES, Checksums, Keep, Push, PushResult, refused
from sglang_rollout.trainer.ranks import MARGIN_SECONDS, Ranks, follow
from sglang_rollout.trainer.snapshot import Snapshots, Staging
from sglang_rollout.trainer.tensors import NamedTensors, Shapes, Source, Specs
from sglang_rollout.trainer.waiting import Deadline, background
from sglang_rollout.wire.ports import FLEET, FLEET_TENSORS
from sglang_rollout.wire.trainer import FleetDocument, ModelTensors
from sglang_rollout.wire.weights import Version

if TYPE_CHECKING:
    from sglang_rollout.trainer.group import Group

log = logging.getLogger(__name__)

INFO_SECONDS = 10.0
"""Calls that only read are answered from the coordinator's memory."""
TENSORS_SECONDS = 40.0
"""An engine's pod reads the headers of all files of its model, at most 30 s."""
OPEN_SECONDS = 180.0
AGAIN_SECONDS = 2.0
"""Between two attempts to open a group."""
GOODBYE_SECONDS = 2.0
"""What a failed push waits for the engines to leave its group: they do at once, or are stuck."""


def connect(url: str, *, timeout: float = 300.0, snapshots: Snapshots | None = None) -> Fleet:
    """Wait until the fleet at ``url`` can take weights (at least one engine is up), at most ``timeout`` seconds.

    ``snapshots``: write some of what is pushed to disk too.
    """
    http = Http(url)
    deadline = Deadline(timeout)
    why = "nothing was asked"
    while True:
        try:
            http.get("/health", timeout=min(INFO_SECONDS, max(deadline.remaining, 1.0)))
            return Fleet(http, snapshots=snapshots)
        except FleetError as error:
            why = str(error)
        if deadline.passed:
            http.close()
            raise FleetUnreachable(
                f"The fleet at {url} did not become healthy within {timeout:.0f} s. The last answer: {why} "
                "Check the URL, and the engines with `kubectl get sglr`."
            )
        time.sleep(min(1.0, deadline.remaining))


def connect_engine(url: str) -> Fleet:
    """One engine of a fleet by itself, past the router, to look at what it says: only ``generate`` works on it.

    ``url`` is a member's of the discovery document. An engine that may not serve answers 503.
    """
    return Fleet(Http(url))


class Fleet:
    """A rollout fleet. Made by ``connect``; close it, or use it in a ``with`` block, so that its group is closed."""

    def __init__(self, http: Http, *, snapshots: Snapshots | None = None) -> None:
        self._http = http
        self.snapshots = snapshots
        """Which pushes are also written to disk; may be set at any time."""
        self._group: Group | None = None
        self._heartbeat: Heartbeat | None = None
        self._fleet_id = ""
        self._choices: dict[str, Any] = {}
        self._shapes: tuple[tuple[str, int], Shapes | None] | None = None
        """Fleet and epoch, and what its engines' model holds; None: the fleet cannot read it."""

    @property
    def url(self) -> str:
        """The fleet's ONE URL."""
        return self._http.url

    def document(self) -> FleetDocument:
        """What the fleet says about itself now: members, ranks, versions, epoch."""
        try:
            return FleetDocument.model_validate(self._http.get(FLEET, timeout=INFO_SECONDS))
        except ValidationError as error:
            raise FleetError(f"{self.url}{FLEET} is no discovery document: {error}. Is this the URL of a rollout's router?") from error

    def generate(
        self,
        prompts: Sequence[str] | None = None,
        *,
        input_ids: Sequence[Sequence[int]] | None = None,
        n: int | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        return_logprob: bool = False,
        timeout: float = 600.0,
        concurrency: int = 256,
    ) -> list[Sample]:
        """Sample ``n`` completions per prompt, in the order of the prompts. Give ``prompts`` (texts) or ``input_ids``.

        Samples of one prompt are neighbours in the list. ``Sample.prompt_index`` and ``Sample.sample_index`` say which is which.
        If the fleet may not serve right now (429, 502, 503, 504), the prompt is sent again until the deadline.

        Args:
            prompts: Texts.
            input_ids: Token ids of each prompt.
            n: Samples per prompt, 1 to 1024. One engine generates all samples of a prompt; repeat the prompt to use several engines.
                ``n`` in ``sampling_params`` has the same meaning. The default is 1.
            sampling_params: SGLang's sampling parameters: one mapping for all prompts, or one for each.
            return_logprob: Return the log-probability of each output token.
            timeout: Seconds for the whole call.
            concurrency: Most prompts that are sent at the same time.

        Raises:
            GenerateFailed: A prompt was refused, or got no sample within ``timeout``. The first failure cancels the prompts that have not
                finished, and the call returns within a second. The exception has the finished samples, the failed prompts with their
                reasons, and the cancelled prompts. KeyboardInterrupt cancels in the same way and stays KeyboardInterrupt.
            TypeError, ValueError: An argument is wrong. No request was sent.
        """
        given = prompts if prompts is not None else input_ids
        if given is None or (prompts is not None and input_ids is not None):
            raise ValueError("Give either prompts or input_ids.")
        return generate(
            self._http,
            given,
            key="text" if prompts is not None else "input_ids",
            n=n,
            sampling_params=sampling_params,
            return_logprob=return_logprob,
            timeout=timeout,
            concurrency=concurrency,
        )

    def open_group(
        self,
        backend: str | None = None,
        *,
        host: str | None = None,
        device: str | None = None,
        timeout: float = OPEN_SECONDS,
    ) -> Group:
        """Open a weight-update group with all engines of the fleet, this process being rank 0.

        ``backend``: the fleet's own by default. ``host``: the address at which the engines reach this process; by
        default that of the interface which routes to the fleet. ``device``: where buckets are assembled; ``cpu`` for
        gloo, the current GPU else. A fleet that cannot take part yet (503: it is starting, say) is asked again until
        ``timeout`` seconds have passed. Later pushes open groups with the same choices.
        """
        self._choices = {"backend": backend, "host": host, "device": device, "timeout": timeout}
        self.close_group()
        deadline = Deadline(timeout)
        while True:
            document = self.document()
            try:
                group = self._open(document, deadline)
            except GroupFailed as error:
                if not error.temporary or deadline.remaining < AGAIN_SECONDS:
                    raise
                log.info("the fleet cannot open a group yet: %s", error)
                time.sleep(AGAIN_SECONDS)
            else:
                self._group = group
                return group

    def _open(self, document: FleetDocument, deadline: Deadline) -> Group:
        """One attempt with the members that the document names."""
        from sglang_rollout.trainer.group import Group, Rendezvous  # noqa: PLC0415 - the one place that needs torch

        choices = self._choices
        meeting = Rendezvous(
            host=choices["host"] or own_address(self._http.host, self._http.port),
            world_size=document.world_size,
            backend=choices["backend"] or document.backend,
            device=choices["device"],
            deadline=deadline,
        )
        process_group = meet(self._http, meeting, deadline)
        self._heartbeat = Heartbeat(self._http, meeting.name, lease=document.lease)
        self._fleet_id = document.fleet_id
        members = [member.name for member in document.members if member.rank_offset is not None]
        return Group(meeting, process_group, epoch=document.epoch, members=members)

    def push(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout: float = 330.0,
        snapshot: bool | None = None,
        checksums: Checksums | None = None,
        specs: Specs | None = None,
        check_model: bool = True,
    ) -> PushResult:
        """Give every engine these weights as ``version``, and return when the fleet has committed it.

        Names, shapes and types are checked before the fleet hears of the push. If a tensor is a ``DTensor`` (FSDP2), every
        rank of its mesh must call ``push`` with the same arguments: the ranks gather the tensors bucket by bucket, the
        lowest rank sends them to the fleet, and all ranks return the same result or raise the same error.

        Args:
            named_tensors: A state dict, or an iterable of (name, tensor) with the names of a Hugging Face checkpoint. An
                iterator is read and checked bucket by bucket, so it may gather shards itself.
            version: Label of the version.
            bucket_bytes: Bytes that travel in one broadcast.
            timeout: Seconds for each step (begin, a bucket, end); a little above the fleet's own deadline, so that the
                fleet, which knows the reason, answers first. Also how long ranks of the trainer wait for each other.
            snapshot: True or False: write this push to disk or not. None: ``snapshots`` decides.
            checksums: What engines of a tensor size must hold afterwards, rank by rank, as SGLang's ``/weights_checker``
                reports it (of a reference engine, say). The fleet compares before it commits, also with ``weights.verify: Off``.
            specs: Name, shape and type of each tensor, in order. With these an iterator is checked before the push begins.
            check_model: Compare names and shapes with the model that the engines were started with, if the fleet can read it.

        Raises:
            PushFailed: The fleet did not commit the version and continues to serve the version before.
            ValueError: An argument is wrong.
        """
        source = Source(named_tensors, specs)
        ranks = _trainer_ranks(source, timeout)
        intent = f"{version} {bucket_bytes}"
        if ranks is not None and not ranks.is_leader:
            return PushResult(**follow(ranks, source, intent, bucket_bytes=bucket_bytes, timeout=timeout))
        try:
            started = time.monotonic()
            if snapshot and self.snapshots is None:
                raise ValueError("snapshot=True needs a place to write to: set fleet.snapshots = Snapshots(directory, model=...).")
            self._check(source, bucket_bytes, compare=check_model)
            if ranks is not None:
                patience = self._choices.get("timeout", OPEN_SECONDS) + 2 * timeout + MARGIN_SECONDS
                ranks.agree(source.digest(intent), patience=patience)
            group = self._current_group()
            staging = self.snapshots.begin(wanted=snapshot) if self.snapshots else None
            opened_ms = (time.monotonic() - started) * 1000
            push = Push(
                self._http, group, version=str(version), bucket_bytes=bucket_bytes, timeout=timeout, checksums=checksums,
                ranks=ranks, keep=_keep(staging, group),
            )  # fmt: skip
            committed = self._run(push, source, str(version))
            phases = {"group": opened_ms, **push.phases, "total": (time.monotonic() - started) * 1000}
            result = push.result(phases)
            if ranks is not None:
                ranks.finish(result)
        except BaseException as error:
            if ranks is not None:
                ranks.fail(error)
            raise
        saved = staging.publish(committed, group.epoch, self._fleet_id) if staging else None
        return PushResult(**result, snapshot=saved)

    def _check(self, source: Source, bucket_bytes: int, *, compare: bool) -> None:
        """Check what is to be pushed. Only reads: a failure leaves the fleet as it is."""
        try:
            source.check(bucket_bytes)
            shapes = self._model_shapes() if compare else None
            if shapes is not None:
                source.compare(shapes)
        except ValueError as error:
            raise refused(error) from error

    def _model_shapes(self) -> Shapes | None:
        """Names and shapes of the engines' model, read once per epoch; None if the fleet cannot read them."""
        document = self.document()
        known = (document.fleet_id, document.epoch)
        if self._shapes is not None and self._shapes[0] == known:
            return self._shapes[1]
        shapes: Shapes | None = None
        try:
            shapes = ModelTensors.model_validate(self._http.get(FLEET_TENSORS, timeout=TENSORS_SECONDS)).shapes
        except (FleetError, ValidationError) as error:
            log.info("Until the fleet's epoch changes, tensors are not compared with the engines' model: %s", error)
        self._shapes = (known, shapes)
        return shapes

    def _run(self, push: Push, source: Source, label: str) -> Version:
        try:
            push.run(source)
            return self._check_committed(label)
        except BaseException:
            # Also on KeyboardInterrupt. Our end first: engines that wait for us in a broadcast give up then, and until they do
            # no call to them is answered.
            self._break_group()
            push.settle(BLAME_SECONDS)
            raise

    def _break_group(self) -> None:
        """Leave a group that is broken, without waiting for engines that may be stuck in it: the next one has another name."""
        group = self._let_go()
        if group is not None:
            group.close()
            wait([background(destroy, self._http, group.name)], timeout=GOODBYE_SECONDS)

    def close_group(self) -> None:
        """Leave the open group, if there is one, and tell the engines to leave it: a broadcast that waits on them ends
        with that.
        """
        group = self._let_go()
        if group is not None:
            destroy(self._http, group.name)
            group.close()

    def _let_go(self) -> Group | None:
        """The open group, which from now on is nobody's; its heartbeat ends."""
        group, self._group = self._group, None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        return group

    def close(self) -> None:
        """Close the group and all connections, after the snapshot that is being written."""
        self.close_group()
        if self.snapshots is not None:
            self.snapshots.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _current_group(self) -> Group:
        """The open group if it is still good for the fleet as it is now, else a new one."""
        document = self.document()
        group = self._group
        if group is not None and group.epoch == document.epoch and any(g.name == group.name for g in document.groups):
            return group
        try:
            return self.open_group(**self._choices)
        except GroupFailed as error:
            raise PushFailed(phase="group", reason=str(error), advice="Nothing was sent. Try again.") from error

    def _check_committed(self, label: str) -> Version:
        committed = self.document().committed
        if committed.label != label:
            raise PushFailed(
                phase="commit",
                reason=f"every step succeeded, but the fleet's committed version is {committed.label!r}, not {label!r}",
                advice="Does another trainer push to this fleet? Look at lastUpdate in GET /fleet.",
            )
        return committed


def _trainer_ranks(source: Source, timeout: float) -> Ranks | None:
    """The trainer's ranks that push together with this one; None if this one pushes alone."""
    if not source.ranks:
        return None
    from sglang_rollout.trainer.group import trainer_ranks  # noqa: PLC0415 - needs torch, which a DTensor has loaded

    return trainer_ranks(source.ranks, timeout=timeout)


def _keep(staging: Staging | None, group: Group) -> Keep | None:
    if staging is None:
        return None
    return lambda spec, tensor: staging.add(spec, tensor, group.host_bytes)
