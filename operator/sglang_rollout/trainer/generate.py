"""``Fleet.generate``: check the arguments, send many prompts at once, and retry while the fleet is busy or takes weights."""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_rollout.json_text import load_json
from sglang_rollout.trainer.arguments import require
from sglang_rollout.trainer.calls import Cancellation, Deadline, Http, run_in_background
from sglang_rollout.trainer.errors import FailedPrompt, FleetUnreachable, GenerateFailed
from sglang_rollout.trainer.refusals import find_error, read_reason
from sglang_rollout.wire import find_lone_surrogate
from sglang_rollout.wire.arguments import find_count_problem, find_flag_problem, find_seconds_problem
from sglang_rollout.wire.reasons import end_sentence, quote_value

RETRIED = frozenset({429, 502, 503, 504})
"""HTTP statuses that pass: too many requests, an engine that died during the request, no engine that may serve. A retry is
safe, because sampling changes nothing.
"""
MAX_PAUSE_SECONDS = 5.0
"""Maximum pause between two attempts, also if ``Retry-After`` is longer: most pushes take much less."""
CANCEL_SECONDS = 0.5
"""How long ``generate`` waits for its threads after a failure. Threads end within milliseconds, except during DNS or a TCP connect."""
SOCKET_GRACE_SECONDS = 5.0
"""Socket timeouts end this long after the deadline, because the calling thread cancels at the deadline and states the reason."""
MAX_SHOWN_FAILURES = 3
"""How many failed prompts a message lists; ``GenerateFailed.failed`` has all."""
MAX_SAMPLES_PER_PROMPT = 1024
"""Maximum of ``n``. One engine generates all samples of a prompt and returns them in one JSON document: with
log-probabilities, 1024 samples of 8192 tokens are about 400 MB.
"""

MAX_TOKEN = 2**31
"""Above every token ID."""

SamplingParams = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt and how to sample it."""

    index: int
    prompt: str | list[int]
    sampling_params: dict[str, Any]
    samples: int
    """Number of samples that the reply must contain."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens of a sample that one version generated."""

    version: str
    """Label of the version."""
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    prompt: str | list[int]
    """The prompt, as given to ``generate``."""
    prompt_index: int
    """Position of the prompt in the list given to ``generate``."""
    sample_index: int
    """Number of this sample among the ``n`` samples of its prompt, from 0."""
    text: str
    """The completion."""
    output_ids: list[int]
    """Token IDs of the completion."""
    logprobs: list[float] | None
    """Log-probability of each output token under the policy that sampled it; only with ``return_logprob=True``."""
    weight_version: str
    """Label of the version that generated the end of the sample."""
    weight_versions: list[VersionSpan]
    """The version of each span of tokens. There are several spans if an update was committed during the sample."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``. A sample ends with ``abort`` if an update with the pause mode Abort ends it early."""
    meta_info: dict[str, Any] = field(repr=False)
    """SGLang's ``meta_info`` of the sample."""

    @property
    def on_policy(self) -> bool:
        """True if one version generated all tokens."""
        return len({span.version for span in self.weight_versions}) == 1


def generate(
    http: Http,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    key: str,
    n: int | None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    return_logprob: bool,
    timeout: float,
    concurrency: int,
    check_names: Callable[[Mapping[str, str], float], None],
) -> list[Sample]:
    """Send one ``/generate`` per prompt, ``concurrency`` at a time. Return the samples in the order of the prompts.

    Before, ``check_names`` gets each name of a sampling parameter with the argument that has it, and the seconds that it may take.
    It raises ValueError for an unknown name.
    """
    to_send = build_prompt_requests(prompts, key=key, n=n, sampling_params=sampling_params)
    require(
        find_count_problem(concurrency, "concurrency"),
        find_seconds_problem(timeout, "timeout"),
        find_flag_problem(return_logprob, "return_logprob"),
    )
    check_names(list_names(to_send, is_list=not isinstance(sampling_params, Mapping | None)), timeout)
    run = _Run(http, to_send, key, return_logprob=return_logprob, deadline=Deadline(timeout))
    run.run(min(concurrency, len(to_send)))
    return run.result()


class _Run:
    """One call of ``generate``: daemon threads take prompts from a queue and send them, while the calling thread waits."""

    def __init__(self, http: Http, prompts: list[PromptRequest], key: str, *, return_logprob: bool, deadline: Deadline) -> None:
        self._http = http
        self._prompts = prompts
        self._key = key
        self._return_logprob = return_logprob
        self._deadline = deadline
        self._cancellation = Cancellation()
        self._changed = threading.Condition()
        self._next = 0
        self._running: dict[int, str] = {}
        """Why each prompt in flight has no sample yet, by the index of the prompt."""
        self._samples: dict[int, list[Sample]] = {}
        self._failed: dict[int, FailedPrompt] = {}
        self._unexpected: BaseException | None = None
        """An exception that is a defect of this module."""

    def run(self, threads: int) -> None:
        """Return when all prompts have finished, one has failed, or the deadline has passed. End all threads, also on KeyboardInterrupt."""
        workers: list[Future[None]] = []
        try:
            for _ in range(threads):
                workers.append(run_in_background(self.send_prompts))
            with self._changed:
                self._changed.wait_for(self._is_over, timeout=self._deadline.remaining)
        finally:
            self._cancellation.cancel()
            wait(workers, timeout=CANCEL_SECONDS)

    def result(self) -> list[Sample]:
        """Return all samples.

        Raises:
            GenerateFailed: A prompt has no samples.
        """
        with self._changed:
            if self._unexpected is not None:
                raise self._unexpected
            samples = [sample for index in sorted(self._samples) for sample in self._samples[index]]
            if len(self._samples) == len(self._prompts):
                return samples
            advice = "" if self._failed else self._fail_unfinished()
            failed = [self._failed[index] for index in sorted(self._failed)]
            cancelled = [each.index for each in self._prompts if each.index not in self._failed and each.index not in self._samples]
            raise GenerateFailed(self._message(failed, cancelled) + advice, samples=samples, failed=failed, cancelled=cancelled)

    def _message(self, failed: list[FailedPrompt], cancelled: list[int]) -> str:
        reasons = " ".join(f"Prompt {each.prompt_index}: {each.reason}" for each in failed[:MAX_SHOWN_FAILURES])
        more = f" The attribute `failed` lists {len(failed) - MAX_SHOWN_FAILURES} more." if len(failed) > MAX_SHOWN_FAILURES else ""
        total, finished = len(self._prompts), len(self._samples)
        return (
            f"{len(failed)} of {total} prompts failed at {self._http.url}. {reasons}{more} "
            f"{finished} finished (attribute `samples`), {len(cancelled)} were cancelled (attribute `cancelled`)."
        )

    def _fail_unfinished(self) -> str:
        """Mark all unfinished prompts as failed, because the deadline has passed. Return advice for the user."""
        late = f"no sample within {self._deadline.seconds:g} s"
        for prompt in self._prompts:
            if prompt.index not in self._samples:
                last = self._running.get(prompt.index)
                reason = f"{late}; {last}" if last else f"{late}; it was not sent, because other prompts ran."
                self._failed[prompt.index] = FailedPrompt(prompt.index, reason)
        return " Look at GET /fleet for engines that may not serve, or raise timeout=."

    def _is_over(self) -> bool:
        return bool(self._failed) or self._unexpected is not None or len(self._samples) == len(self._prompts)

    def send_prompts(self) -> None:
        """Send prompts until none is left or the run is cancelled."""
        while (prompt := self._take_prompt()) is not None:
            try:
                samples = self._sample(prompt)
            except _PromptRefused as error:
                self._finish_prompt(prompt, failed=FailedPrompt(prompt.index, str(error), error.code))
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                with self._changed:
                    self._unexpected = error
                    self._changed.notify_all()
            else:
                self._finish_prompt(prompt, samples=samples)

    def _take_prompt(self) -> PromptRequest | None:
        with self._changed:
            if self._cancellation.is_requested or self._unexpected is not None or self._next == len(self._prompts):
                return None
            prompt = self._prompts[self._next]
            self._next += 1
            self._running[prompt.index] = "the fleet has not answered."
            return prompt

    def _finish_prompt(self, prompt: PromptRequest, *, samples: list[Sample] | None = None, failed: FailedPrompt | None = None) -> None:
        with self._changed:
            if samples is not None:
                self._samples[prompt.index] = samples
            elif failed is not None:
                self._failed[prompt.index] = failed
            else:
                return  # the prompt was cancelled, and stays in _running
            del self._running[prompt.index]
            self._changed.notify_all()

    def _sample(self, prompt: PromptRequest) -> list[Sample] | None:
        """Return the samples of one prompt; None if the run was cancelled first."""
        # The parameters first: the fleet looks for some of them at the beginning of the body only.
        body = {"sampling_params": prompt.sampling_params, self._key: prompt.prompt, "return_logprob": self._return_logprob}
        attempt = 0
        while not self._cancellation.is_requested:
            attempt += 1
            timeout = self._deadline.remaining + SOCKET_GRACE_SECONDS
            try:
                response = self._http.send("POST", "/generate", body, timeout=timeout, cancellation=self._cancellation)
            except FleetUnreachable as error:
                last, pause = str(error), _backoff(attempt)
            else:
                if response.ok:
                    return parse_samples(prompt, response, with_logprobs=self._return_logprob)
                reason = read_reason(response)
                last = f"HTTP {response.status_code}: {reason.message}"
                if response.status_code not in RETRIED:
                    raise _PromptRefused(f"refused with {end_sentence(last)}", reason.code)
                pause = _retry_after_seconds(response) or _backoff(attempt)
            with self._changed:
                if not self._cancellation.is_requested:  # after a cancellation the error is that of the closed socket
                    self._running[prompt.index] = f"the last answer (attempt {attempt}): {end_sentence(last)}"
            self._cancellation.wait(min(pause, MAX_PAUSE_SECONDS))
        return None


class _PromptRefused(Exception):
    """A prompt that must not be retried: the fleet refused it, or its reply cannot be read."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def parse_samples(request: PromptRequest, response: requests.Response, *, with_logprobs: bool) -> list[Sample]:
    """Read SGLang's reply to ``/generate``: an object, or a list of ``n`` objects if ``n`` is above 1.

    Raises:
        _PromptRefused: The reply has another shape.
    """
    try:
        reply = load_json(response.content)
    except ValueError:
        reply = None
    found = reply if isinstance(reply, list) else [reply]
    if len(found) == request.samples and all(isinstance(each, dict) and isinstance(each.get("meta_info"), dict) for each in found):
        try:
            return [parse_sample(request, number, each, with_logprobs=with_logprobs) for number, each in enumerate(found)]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise _PromptRefused(f"a field of the reply is not as SGLang writes it ({error!r}): {_quote_start(response)}") from error
    refused = find_error(response)
    if refused is not None:
        raise _PromptRefused(f"refused with {end_sentence(refused.message)}", refused.code)
    wanted = "1 sample" if request.samples == 1 else f"a list of {request.samples} samples"
    received = f"a list of {len(reply)}" if isinstance(reply, list) else "something else"
    raise _PromptRefused(f"the reply is {received}, not {wanted} with meta_info: {_quote_start(response)}")


def parse_sample(request: PromptRequest, number: int, reply: Mapping[str, Any], *, with_logprobs: bool) -> Sample:
    """Read one sample from SGLang's reply to ``/generate``."""
    meta: dict[str, Any] = reply["meta_info"]
    output_ids = list(reply.get("output_ids") or [])
    version = str(meta.get("weight_version", ""))
    spans = [VersionSpan(str(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions") or []]
    reason = meta.get("finish_reason")
    return Sample(
        prompt=request.prompt,
        prompt_index=request.index,
        sample_index=number,
        text=reply.get("text", ""),
        output_ids=output_ids,
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []] if with_logprobs else None,
        weight_version=version,
        weight_versions=spans or [VersionSpan(version, 0, len(output_ids))],
        finish_reason=str(reason.get("type", "")) if isinstance(reason, dict) else str(reason or ""),
        meta_info=meta,
    )


def _retry_after_seconds(response: requests.Response) -> float | None:
    """Return the seconds of ``Retry-After``; None if it is missing. The fleet does not use its date form."""
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdigit() else None


def _backoff(attempt: int) -> float:
    return float(min(0.1 * 2 ** min(attempt - 1, 10), 2.0))


def _quote_start(response: requests.Response) -> str:
    """Return the beginning of a reply's body, for a message."""
    shown = response.text[:200]
    return f"HTTP {response.status_code} {shown!r}."


def build_prompt_requests(
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    key: str,
    n: int | None,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[PromptRequest]:
    """Return one request per prompt, in order.

    Args:
        prompts: Texts or token ids, depending on ``key``.
        key: ``text`` or ``input_ids``.
        n: Samples per prompt; None: ``sampling_params`` decides.
        sampling_params: One mapping for all prompts, or one for each.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is out of range, or two arguments disagree.
    """
    checked = _check_prompts(prompts, key)
    if n is not None:
        n = _check_n(n, "n")
    each = _resolve_all_params(sampling_params, n, len(checked))
    return [PromptRequest(index, prompt, *each[index]) for index, prompt in enumerate(checked)]


def list_names(prompts: Sequence[PromptRequest], *, is_list: bool) -> dict[str, str]:
    """Return each name of a sampling parameter, and the first argument that has it. ``is_list``: each prompt has its own parameters."""
    found: dict[str, str] = {}
    for each in prompts if is_list else prompts[:1]:
        for name in each.sampling_params:
            found.setdefault(str(name), f"sampling_params[{each.index}]" if is_list else "sampling_params")
    return found


def _resolve_all_params(given: Any, n: int | None, prompts: int) -> list[tuple[dict[str, Any], int]]:
    if given is None or isinstance(given, Mapping):
        return [_resolve_params(given or {}, n, "sampling_params")] * prompts
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(f"sampling_params is {_describe_value(given)}; expected a mapping, or a list with one mapping for each prompt.")
    if len(given) != prompts:
        raise ValueError(f"{len(given)} sampling_params for {prompts} prompts; give one for all, or one for each.")
    return [_resolve_params(params, n, f"sampling_params[{index}]") for index, params in enumerate(given)]


def _check_prompts(prompts: Sequence[str] | Sequence[Sequence[int]], key: str) -> list[str | list[int]]:
    name = "prompts" if key == "text" else key
    if isinstance(prompts, str | bytes):
        raise TypeError(f"{name} is {_describe_value(prompts)}; expected a list: {name}=[...].")
    check = _check_text if key == "text" else _check_token_ids
    return [check(each, f"{name}[{i}]") for i, each in enumerate(prompts)]


def _check_text(prompt: Any, name: str) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"{name} is {_describe_value(prompt)}; expected a text. Pass token ids as input_ids=.")
    require(find_lone_surrogate({name: prompt}))
    return prompt


def _check_token_ids(prompt: Any, name: str) -> list[int]:
    try:
        found = [operator.index(token) for token in prompt]  # converts NumPy's integers, which JSON cannot write
    except TypeError as error:
        raise TypeError(f"{name} is {_describe_value(prompt)}; expected a list of integer token ids. Pass texts as prompts=.") from error
    wrong = next((token for token in found if not 0 <= token < MAX_TOKEN), None)
    if wrong is not None or any(isinstance(token, bool) for token in prompt):
        raise ValueError(f"{name} has {quote_value(wrong if wrong is not None else True)}; token ids are whole numbers from 0.")
    return found


def _resolve_params(params: Any, n: int | None, name: str) -> tuple[dict[str, Any], int]:
    """Return the parameters to send, and the number of samples that the reply must contain."""
    if not isinstance(params, Mapping):
        raise TypeError(f"{name} is {_describe_value(params)}; expected a mapping such as {{'max_new_tokens': 64}}.")
    fields = dict(params)
    own = fields.pop("n", None)
    if own is not None:
        own = _check_n(own, f"{name}['n']")
    if n is not None and own is not None and own != n:
        raise ValueError(f"n={n}, but {name} has n={own}. Give one of them.")
    samples = n or own or 1
    if samples != 1:
        fields["n"] = samples
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be sent as JSON: {error}.") from error
    # With a beam search, SGLang returns one sample, which lists n beams in meta_info["beam_results"].
    width = fields.get("beam_width")
    return fields, 1 if isinstance(width, int) and width > 1 else samples


def _check_n(n: Any, name: str) -> int:
    if isinstance(n, bool):
        raise TypeError(f"{name} is {n}; expected an integer.")
    try:
        number = operator.index(n)
    except TypeError:
        raise TypeError(f"{name} is {_describe_value(n)}; expected an integer.") from None
    if not 1 <= number <= MAX_SAMPLES_PER_PROMPT:
        more = " To get more, repeat the prompt: repeated prompts are spread over the engines." if number > 1 else ""
        raise ValueError(f"{name} is {number}; expected 1 to {MAX_SAMPLES_PER_PROMPT} samples per prompt.{more}")
    return number


def _describe_value(value: Any) -> str:
    """Return a short text with a value and its type."""
    return f"{quote_value(value)} ({type(value).__name__})"
