"""The handle on a fleet that ``connect`` returns: generate samples and push weights through one URL."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, get_args

from pydantic import ValidationError

from sglang_rollout.trainer.arguments import check_group_options, check_push
from sglang_rollout.trainer.calls import Http
from sglang_rollout.trainer.deltas import LastUpload
from sglang_rollout.trainer.errors import (
    FleetError,
    GroupFailed,
    PushFailed,
)
from sglang_rollout.trainer.generate import Sample, SamplingParams, generate
from sglang_rollout.trainer.group_control import OPEN_SECONDS, GroupControl, GroupOptions
from sglang_rollout.trainer.push import (
    DEFAULT_BUCKET_BYTES,
    OTHER_SIDE_SECONDS,
    Checksums,
    Push,
    PushOptions,
    PushResult,
    TensorSink,
    prepare_failure,
    wait_for_commit,
)
from sglang_rollout.trainer.ranks import MARGIN_SECONDS, Ranks, follow
from sglang_rollout.trainer.sampling_names import SamplingNames
from sglang_rollout.trainer.snapshots import HostBytes, Snapshots, Staging
from sglang_rollout.trainer.tensors import NamedTensors, Shapes, Source, Specs
from sglang_rollout.trainer.upload import COMMIT_STEPS, Upload, Wait
from sglang_rollout.wire.ports import FLEET, FLEET_TENSORS
from sglang_rollout.wire.trainer import TRANSPORT_STAGED, FleetDocument, ModelTensors

if TYPE_CHECKING:
    from sglang_rollout.trainer.process_group import ProcessGroup

log = logging.getLogger(__name__)

INFO_SECONDS = 10.0
"""Timeout of reading calls, which the coordinator answers from memory."""
RETRY_SECONDS = 1.0
"""Pause before a push is sent again: the fleet has noticed a lost engine by then."""
TENSORS_SECONDS = 40.0
"""Timeout of reading the model's tensors: an engine's pod may take 30 s to read the headers of all files."""


class Fleet:
    """A handle on a rollout fleet. ``connect`` returns it. Close it, or use it in a ``with`` block, to close its process group."""

    def __init__(self, http: Http, *, snapshots: Snapshots | None = None, delta: bool = False) -> None:
        self._http = http
        self._last_upload = LastUpload() if delta else None
        self.snapshots = snapshots
        """Which pushes are also written to disk. May be set at any time."""
        self._groups = GroupControl(http, self.document)
        self._sampling_names = SamplingNames(lambda seconds: self._read_document(min(seconds, INFO_SECONDS)))
        self._shapes: tuple[tuple[str, int], Shapes | None] | None = None
        """Fleet ID and epoch, and the tensors of the engines' model. None as tensors: the fleet cannot read its model."""

    @property
    def url(self) -> str:
        """The fleet's URL."""
        return self._http.url

    def document(self) -> FleetDocument:
        """Read the discovery document (``GET /fleet``): members, ranks, versions, epoch.

        Raises:
            FleetError: The URL does not answer with a discovery document.
        """
        return self._read_document(INFO_SECONDS)

    def _read_document(self, timeout: float) -> FleetDocument:
        try:
            return FleetDocument.model_validate(self._http.get(FLEET, timeout=timeout))
        except ValidationError as error:
            raise FleetError(f"{self.url}{FLEET} is not a discovery document: {error}. Is this the URL of a rollout's router?") from error

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
            sampling_params: SGLang's sampling parameters: one mapping for all prompts, or one for each. A name that the engines do not know
                is refused, if the fleet says which names they know.
            return_logprob: Return the log-probability of each output token.
            timeout: Seconds for the whole call.
            concurrency: Maximum number of prompts in flight.

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
            check_names=self._sampling_names.check,
        )

    def open_group(
        self,
        backend: str | None = None,
        *,
        host: str | None = None,
        device: str | None = None,
        timeout: float = OPEN_SECONDS,
    ) -> ProcessGroup:
        """Open a process group for weight updates. This process is rank 0, and the others are the engines or the weight store.

        ``push`` opens a process group by itself. Call this method to choose its options: later pushes use the same ones.
        While the fleet cannot open a process group (503, for example while engines start), the call is retried.

        Args:
            backend: torch's backend. The default is the fleet's.
            host: Address at which the engines reach this process. The default is that of the interface that routes to the
                fleet.
            device: Where buckets are assembled. The default is ``cpu`` for gloo and the current GPU for other backends.
            timeout: Seconds for the whole call.

        Raises:
            GroupFailed: The process group could not be opened.
        """
        check_group_options(backend, host, device, timeout)
        self._groups.options = GroupOptions(backend, host, device, timeout)
        return self._groups.open()

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
        wait: Wait = "committed",
        retries: int = 0,
    ) -> PushResult:
        """Send these weights to every engine as ``version``. Return when the fleet has committed the version.

        A fleet with ``weights.transport: Staged`` gets the weights as an upload over HTTP, unless ``open_group`` was called before.
        Its engines generate meanwhile, and a push that fails before the commit changes nothing that is served.

        Names, shapes and types are checked before the first call to the fleet. If a tensor is a ``DTensor`` (FSDP2), every
        rank of its mesh must call ``push`` with the same arguments: the ranks gather the tensors bucket by bucket, the
        lowest rank sends them to the fleet, and all ranks return the same result or raise the same error.

        Args:
            named_tensors: A state dict, or an iterable of (name, tensor) with the names of a Hugging Face checkpoint. An
                iterator is read and checked bucket by bucket, so it may gather shards itself.
            version: Label of the version.
            bucket_bytes: Maximum bytes of one broadcast.
            timeout: Seconds for each step (begin, a bucket or a piece, end), and for ranks of the trainer to wait for each other. The
                commit of an upload may take three times as long, because engine pods copy the version and engines load it. The
                default is above the fleet's own deadline, so that the fleet's error, which has the reason, comes first.
            snapshot: True or False: write this push to disk or not. None: ``snapshots`` decides.
            checksums: Expected checksums of an engine, by its number of tensor-parallel ranks: the ``per_gpu_checksum`` of each
                rank, as SGLang's ``/weights_checker`` reports it for a reference engine. The fleet compares them before it
                commits, also with ``weights.verify: Off``.
            specs: Name, shape and type of each tensor, in order. With these an iterator is checked before the push begins.
            check_model: Refuse tensors that the engines' model does not have, or has with another shape, if the fleet knows its tensors.
                False: such tensors are sent, and ``PushResult.unchecked`` names them.
            wait: ``"staged"``: return when the fleet has all bytes of an upload, before the engines load them. Such a push gets no
                snapshot.
            retries: Further attempts after a failure that may not recur, above all an engine that ended in the middle: the push waits for
                the engines that are left and sends the same version again. Needs a state dict or a list, not an iterator. With
                ``DTensor`` weights all ranks repeat the push together.

        Raises:
            PushFailed: The fleet did not commit the version, and continues to serve the previous version; or it committed the version
                with too few engines (``weights.transport: Staged``). The exception's ``advice`` says which.
            ValueError: An argument is wrong.
        """
        check_push(
            {"named_tensors": named_tensors, "specs": specs, "version": version, "bucket_bytes": bucket_bytes, "timeout": timeout}
            | {"snapshot": snapshot, "checksums": checksums, "check_model": check_model, "wait": wait, "retries": retries},
            get_args(Wait),
        )
        label = version if isinstance(version, str) else str(operator.index(version))
        options = PushOptions(label, bucket_bytes, timeout, check_model, checksums or {})
        source, failed = Source(named_tensors, specs), list[str]()
        if retries and not source.is_repeatable:
            raise ValueError("retries needs a state dict or a list: the tensors of an iterator can be sent once. Nothing was sent.")
        while True:
            try:
                return self._push_once(source, options, snapshot=snapshot, wait=wait, again=bool(failed))
            except PushFailed as error:
                error.attempts = tuple(failed)
                if len(failed) >= retries or not error.is_retryable:
                    raise
                failed.append(str(error))
                log.warning("Pushing version %s again (attempt %d of %d): %s", label, len(failed) + 1, retries + 1, error)
            time.sleep(RETRY_SECONDS)
            source = Source(named_tensors, specs)

    def _push_once(self, source: Source, options: PushOptions, *, snapshot: bool | None, wait: Wait, again: bool) -> PushResult:
        """Make one attempt of a push, as the leading rank or as a follower."""
        ranks = _trainer_ranks(source, options.timeout)
        if ranks is not None and not ranks.is_leader:
            return PushResult(**follow(ranks, source, options.intent, bucket_bytes=options.bucket_bytes, timeout=options.timeout))
        with nullcontext() if ranks is None else ranks.publish_failure():
            return self._lead_push(source, options, ranks, snapshot=snapshot, wait=wait, again=again)

    def _lead_push(
        self, source: Source, options: PushOptions, ranks: Ranks | None, *, snapshot: bool | None, wait: Wait, again: bool
    ) -> PushResult:
        """Push as the rank that talks to the fleet."""
        started = time.monotonic()
        if snapshot and self.snapshots is None:
            raise ValueError("snapshot=True needs a directory: set fleet.snapshots = Snapshots(directory, model=...).")
        self._check(source, options.bucket_bytes, compare=options.check_model)
        uploads = self._groups.group is None and self.document().transport == TRANSPORT_STAGED
        if wait == "staged" and (snapshot or not uploads):
            raise ValueError('wait="staged" needs an upload (weights.transport: Staged, and no open_group()) and no snapshot=True.')
        if ranks is not None:
            steps = 1 + COMMIT_STEPS if uploads else 2
            patience = self._groups.options.timeout + steps * options.timeout + MARGIN_SECONDS
            ranks.agree(source.digest(options.intent), patience=patience)
        if uploads:
            return self._upload(source, options, ranks, snapshot=snapshot, wait=wait, started=started, again=again)
        group = self._current_group()
        staging = self.snapshots.begin(wanted=snapshot, again=again) if self.snapshots else None
        push = Push(self._http, group, options, ranks=ranks, tensor_sink=_tensor_sink(staging, group.host_bytes))
        push.phases["group"] = (time.monotonic() - started) * 1000
        document = self._run(push, source, options)
        push.phases["total"] = (time.monotonic() - started) * 1000
        result = push.result() | {"unchecked": _read_unchecked(document, options.version)}
        if ranks is not None:
            ranks.finish(result)
        saved = staging.publish(document.committed, group.epoch, document.fleet_id) if staging else None
        return PushResult(**result, snapshot=saved)

    def _upload(
        self,
        source: Source,
        options: PushOptions,
        ranks: Ranks | None,
        *,
        snapshot: bool | None,
        wait: Wait,
        started: float,
        again: bool,
    ) -> PushResult:
        """Push as an upload over HTTP."""
        from sglang_rollout.trainer.process_group import copy_bytes, read_bytes  # noqa: PLC0415 - imports torch, as the tensors have

        staging = self.snapshots.begin(wanted=snapshot, again=again) if self.snapshots and wait == "committed" else None
        sink = _tensor_sink(staging, copy_bytes)
        upload = Upload(self._http, options, wait=wait, read_bytes=read_bytes, ranks=ranks, tensor_sink=sink, last=self._last_upload)
        upload.phases["group"] = (time.monotonic() - started) * 1000
        upload.run(source)
        document = self.document() if upload.state == "staged" else self._check_committed(options.version)
        upload.phases["total"] = (time.monotonic() - started) * 1000
        result = upload.result(document.epoch) | {"unchecked": _read_unchecked(document, options.version)}
        if ranks is not None:
            ranks.finish(result)
        saved = staging.publish(document.committed, document.epoch, document.fleet_id) if staging else None
        return PushResult(**result, snapshot=saved)

    def _check(self, source: Source, bucket_bytes: int, *, compare: bool) -> None:
        """Check the tensors of a push. Only reads from the fleet.

        Raises:
            PushFailed: A tensor cannot be sent, or does not fit the engines' model.
        """
        try:
            source.check(bucket_bytes)
            shapes = self._model_shapes() if compare else None
            if shapes is not None:
                source.compare(shapes)
        except ValueError as error:
            raise prepare_failure(error) from error

    def _model_shapes(self) -> Shapes | None:
        """Return names and shapes of the engines' model, read once per epoch; None if the fleet cannot read them."""
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

    def _run(self, push: Push, source: Source, options: PushOptions) -> FleetDocument:
        """Transfer the tensors, and return the fleet's document after the commit."""
        try:
            push.run(source)
            if push.staged:
                wait_for_commit(self.document, push.staged, COMMIT_STEPS * options.timeout)
            return self._check_committed(options.version)
        except BaseException:
            # Also on KeyboardInterrupt. The trainer leaves first: engines that wait for it in a broadcast fail then, and answer
            # no call before that.
            self._groups.abandon()
            push.wait_for_broadcast(OTHER_SIDE_SECONDS)
            raise

    def close_group(self) -> None:
        """Close the open process group, if there is one, on the engines and here. This ends a broadcast that waits for engines."""
        self._groups.close()

    def close(self) -> None:
        """Close the process group, wait for a running snapshot, and close all connections."""
        self.close_group()
        if self.snapshots is not None:
            self.snapshots.close()
        if self._last_upload is not None:
            self._last_upload.forget()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Fleet belongs to one process and cannot be copied. Call connect() in the other process.")

    def _current_group(self) -> ProcessGroup:
        try:
            return self._groups.current()
        except GroupFailed as error:
            raise PushFailed(phase="group", reason=str(error), advice="Nothing was sent. Try again.") from error

    def _check_committed(self, label: str) -> FleetDocument:
        document = self.document()
        committed = document.committed.label
        if committed != label:
            raise PushFailed(
                phase="commit",
                reason=f"every step succeeded, but the fleet's committed version is {committed!r}, not {label!r}",
                advice="Does another trainer push to this fleet? See last_update in GET /fleet.",
            )
        return document


def _read_unchecked(document: FleetDocument, label: str) -> str:
    """Return what the fleet did not compare in the update to a version, and warn of it; empty if the update has not ended yet."""
    last = document.last_update
    unchecked = last.unchecked if last is not None and last.version.label == label else ""
    if unchecked:
        log.warning("Version %s: %s", label, unchecked)
    return unchecked


def _trainer_ranks(source: Source, timeout: float) -> Ranks | None:
    """Return the trainer's ranks that push together with this rank; None if this rank pushes alone."""
    if not source.ranks:
        return None
    from sglang_rollout.trainer.process_group import connect_ranks  # noqa: PLC0415 - imports torch, which a DTensor has loaded

    return connect_ranks(source.ranks, timeout=timeout)


def _tensor_sink(staging: Staging | None, host_bytes: HostBytes) -> TensorSink | None:
    if staging is None:
        return None
    return lambda spec, tensor: staging.add(spec, tensor, host_bytes)
