"""Updates with transport Staged: tensors arrive at the weight store, by process group or upload, while engines generate. Pure.

The source of the tensors ends here: :mod:`.activation` commits every such update in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_rollout.coordinator.update.activation import commit_staged, staged_part
from sglang_rollout.coordinator.update.announced import refuse_fewer_in_version
from sglang_rollout.coordinator.update.complete_push import Tensors, announced_names, describe_misfits, note_checked, read_model
from sglang_rollout.coordinator.update.loading import finish_roll
from sglang_rollout.coordinator.update.membership import refuse_asleep, require_store
from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.outcome import NAMES_AND_SHAPES, abandon, fail_update
from sglang_rollout.coordinator.update.phases import Phase, StagedUpdate
from sglang_rollout.coordinator.update.phases import Update as OpenUpdate
from sglang_rollout.coordinator.update.requests import Answer, Begin, CommitUpload, Pause, Request, Update, Upload, WithdrawUpload
from sglang_rollout.coordinator.update.staging import (
    count_bytes,
    describe_large,
    find_repeated,
    kept_updates,
    parents_in_tree,
    refuse_large,
    require_staging,
    shard_of,
    size_limit,
    stage_body,
)
from sglang_rollout.coordinator.update.steps import ANSWER_MARGIN_SECONDS, reply, send
from sglang_rollout.coordinator.update.store import STORE
from sglang_rollout.coordinator.update.transaction import find_group, live_members, refuse_stale_group
from sglang_rollout.sglang.api import FLATTENED
from sglang_rollout.wire.ports import AGENT_STAGE, FLEET_UPDATES, STORE_OPEN, STORE_RECEIVE
from sglang_rollout.wire.reasons import Refusal, RefusalCode, RefusedError
from sglang_rollout.wire.record import EndedUpdate, UpdateOutcome, UpdateReason
from sglang_rollout.wire.staged import PIECE_BYTES, Shard, StoreOpenRequest, StoreReceiveRequest

EARLY_SECONDS = 5.0
"""Deadline of the call that lets agents copy while the version still arrives. An agent answers it at once."""
EARLY_PATIENCE_SECONDS = 0.5
"""How much later than half of the agents another one may answer that call, at least. The trainer waits for it."""

_BEGINNING = (Pause, Begin, Update, Upload)
"""First calls of a push."""
_OF_SEVERAL_RANKS = (Pause, Update)
"""Calls that several ranks of a trainer may make at the same time."""


def refuse_further_push(fleet: Fleet, request: Request, caller: str, waiting: Iterable[tuple[Request | None, str]]) -> RefusedError | None:
    """Return the refusal of a push while another one waits until engines have loaded a staged version; None if it may wait.

    Args:
        fleet: The fleet.
        request: The call that arrives.
        caller: Who sends it.
        waiting: The calls that wait, each with its caller.
    """
    staged = fleet.update.staged if fleet.update is not None else None
    if staged is None or not (staged.is_complete or staged.is_waiting) or not isinstance(request, _BEGINNING):
        return None
    earlier = [(other, sender) for other, sender in waiting if isinstance(other, _BEGINNING)]
    if all(isinstance(request, _OF_SEVERAL_RANKS) and type(other) is type(request) and sender == caller for other, sender in earlier):
        return None
    now = f"The engines load version {fleet.target()} now" if staged.is_complete else f"Version {fleet.target()} waits for engines to be up"
    message = f"{now}, and another push waits for that already. Try again when GET /fleet shows that this version is committed."
    return RefusedError(message, status=409, fleet={"state": "staged", "update": staged.id, "version": str(fleet.target())})


async def begin(fleet: Fleet, ask: Begin) -> Answer:
    """Open an update for a trainer with a session. Its tensors come through the open process groups."""
    live_members(fleet)
    if ask.names:
        await refuse_fewer_in_version(fleet, ask.names, ask.label)
    staged = await _open_update(fleet, ask.label or fleet.transaction.label, trainer_session=True)
    return Answer(200, "Success", {**fleet.advice(), "version": str(fleet.target()), "update": staged.id})


async def _open_update(
    fleet: Fleet,
    label: str | None,
    *,
    trainer_session: bool = False,
    shards: Iterable[Shard] = (),
    base: str = "",
) -> StagedUpdate:
    """Open an update at the weight store, and let the agents copy while its tensors arrive. Raises RefusedError if the store refuses."""
    refuse_asleep(fleet)
    if require_staging(fleet).copies == 1:
        await finish_roll(fleet)  # the pods delete their copies of the committed version now
    listed = list(shards)
    staged = StagedUpdate(fleet.new_update_id(), require_store(fleet), is_upload=bool(listed))
    fleet.transaction.update = OpenUpdate({}, fleet.now, label, fleet.caller, trainer_session=trainer_session, staged=staged)
    try:
        body = StoreOpenRequest(
            update=staged.id, ticket="", size_limit=size_limit(fleet), shards=listed, keep=kept_updates(fleet), base=base,
            upload_seconds=fleet.policy.deadlines.total_seconds,
        )  # fmt: skip
        sent = {STORE: body.model_dump(mode="json")}
        result = (await send(STORE_OPEN, sent, fleet.policy.deadlines.pause_seconds, idempotent=True))[STORE]
        if result.code is RefusalCode.BASE_MISSING:
            raise RefusedError(Refusal(result.code, result.message), fleet=fleet.advice())
        if not result.ok:
            why = result.message.rstrip(".")
            raise RefusedError(f"The weight store did not open the update: {why}. Nothing has changed.", status=503, fleet=fleet.advice())
    except RefusedError:
        fleet.transaction.update = None
        raise
    fleet.enter(Phase.STAGE)
    fleet.hold()
    tree = parents_in_tree(list(fleet.members()), require_staging(fleet).fanout)
    # Tensors arrive until the trainer commits. From then on the pods have the time of stageSeconds.
    seconds = fleet.policy.deadlines.total_seconds + fleet.policy.deadlines.stage_seconds
    bodies = {name: stage_body(fleet, staged.id, parents, deadline=seconds) for name, parents in tree.items()}
    # An agent that cannot begin now does so when the version is complete.
    await send(AGENT_STAGE, bodies, EARLY_SECONDS, patience=EARLY_PATIENCE_SECONDS)
    return staged


async def receive(fleet: Fleet, ask: Update) -> Answer:
    """Let the weight store receive tensors from a process group. The first tensors open the update of a trainer without a session."""
    if fleet.update is not None and staged_part(fleet.update).is_upload:
        raise RefusedError("An upload is open: its tensors come as pieces, and not through a process group.", status=409)
    group = find_group(fleet, ask.group)
    refuse_stale_group(fleet, group)
    shard, limit = shard_of(ask.body), size_limit(fleet)
    size, model, tensors = count_bytes([shard]), await read_model(fleet), _tensors_of([shard])
    problem = describe_misfits(model, tensors) if ask.check_model else ""
    if problem and fleet.update is None:
        raise RefusedError(f"{problem} Nothing was sent.", fleet=fleet.advice())
    if problem:
        return await fail_update(fleet, UpdateReason.MISFIT, problem)
    if fleet.update is None:
        refuse_large(size, limit)
        await _open_update(fleet, ask.label or fleet.transaction.label)
    update = fleet.require_update()
    staged = staged_part(update)
    update.label = ask.label or update.label
    update.bytes = (update.bytes or 0) + size
    if update.bytes > limit:
        return await fail_update(fleet, UpdateReason.TOO_LARGE, describe_large(update.bytes, limit))
    fleet.enter(Phase.STAGE)
    names, seconds = announced_names(ask.body), fleet.policy.deadlines.update_seconds
    note_checked(update, model, tensors)
    request = StoreReceiveRequest(
        update=staged.id, group_name=group.name, shard=shard, flattened=ask.body.get("load_format") == FLATTENED, deadline=seconds
    )
    result = (await send(STORE_RECEIVE, {STORE: request.model_dump(mode="json")}, seconds + ANSWER_MARGIN_SECONDS))[STORE]
    if not result.ok:
        return await fail_update(fleet, UpdateReason.STORE_FAILED, f"the weight store did not receive the tensors: {result.message}")
    update.data.add(group.name)
    update.tensors.setdefault((STORE,), set()).update(names)
    return Answer(200, "Succeeded to update parameter online.", {"version": str(fleet.target()), "update": staged.id})


# --- uploads ---------------------------------------------------------------------------------------------------------


async def check_upload(fleet: Fleet, ask: Upload) -> int:
    """Check an upload before a byte moves: its size, and every tensor against the model. Returns its bytes."""
    refuse_asleep(fleet)
    require_store(fleet)
    size = count_bytes(ask.shards)
    refuse_large(size, size_limit(fleet))
    repeated = find_repeated(ask.shards)
    if repeated:
        raise RefusedError(f"The tensor {repeated} comes twice. Nothing was uploaded.")
    tensors = _tensors_of(ask.shards)
    problem = describe_misfits(await read_model(fleet), tensors)
    if problem and ask.check_model:
        raise RefusedError(f"{problem} Nothing was uploaded.")
    await refuse_fewer_in_version(fleet, [name for name, _ in tensors], ask.label)
    return size


def _tensors_of(shards: Iterable[Shard]) -> Tensors:
    return [(tensor.name, tensor.shape) for shard in shards for tensor in shard.tensors]


def _refuse_other_base(fleet: Fleet, base: str) -> None:
    """Raise RefusedError unless the pods can have the version from which an upload differs. The weight store checks whether it has it."""
    committed = fleet.weights.staged
    if base and require_staging(fleet).copies == 1:
        message = "The upload differs from the committed version, which is deleted first (staging.copies is 1). Upload all pieces whole."
        raise RefusedError(Refusal(RefusalCode.BASE_MISSING, message), fleet=fleet.advice())
    if base and (committed is None or committed.digest != base):
        found = f"has the digest {committed.digest[:12]}…" if committed is not None else "did not come through the weight store"
        message = (
            f"The upload differs from a version with the digest {base[:12]}…, but the committed version {found}. Upload all pieces whole."
        )
        raise RefusedError(Refusal(RefusalCode.BASE_MISSING, message), fleet=fleet.advice())


async def open_upload(fleet: Fleet, ask: Upload, size: int) -> Answer:
    """Open an update whose version the trainer uploads. The answer has no ticket: the HTTP route adds it."""
    _refuse_other_base(fleet, ask.base)
    staged = await _open_update(fleet, ask.label or fleet.transaction.label, shards=ask.shards, base=ask.base)
    update = fleet.require_update()
    update.bytes = size
    note_checked(update, await read_model(fleet), _tensors_of(ask.shards))
    update.tensors[(STORE,)] = {tensor.name for shard in ask.shards for tensor in shard.tensors}
    details = {
        "update": staged.id, "piece_bytes": PIECE_BYTES, "expires_seconds": fleet.policy.deadlines.total_seconds,
        "store": fleet.store.wanted.name if fleet.store is not None else "",
    }  # fmt: skip
    details |= {"base": ask.base} if ask.base else {}
    return Answer(200, f"Upload the pieces, then POST {FLEET_UPDATES}/{staged.id}/commit.", {**details, "version": str(fleet.target())})


async def commit_upload(fleet: Fleet, ask: CommitUpload) -> Answer:
    """Commit an upload. A repeated call answers how the update ended."""
    update = fleet.update
    if update is None or update.staged is None or update.staged.id != ask.update:
        return _answer_ended(fleet, ask.update)
    update.checksums = ask.checksums
    return await commit_staged(fleet, answer_when_staged=not ask.wait)


async def withdraw_upload(fleet: Fleet, ask: WithdrawUpload) -> Answer:
    """Give up an upload for its trainer."""
    update = fleet.update
    if update is not None and update.staged is not None and update.staged.id == ask.update:
        answer = Answer(200, "The upload was withdrawn. Nothing has changed.", {"update": ask.update})
        await reply(answer)  # the store and the agents delete their copies afterwards
        await abandon(fleet, UpdateReason.WITHDRAWN, "the trainer withdrew its upload")
        return answer
    ended = _find_ended(fleet, ask.update)
    if ended.reason is UpdateReason.WITHDRAWN:
        return Answer(200, "The upload has been withdrawn before.", {"update": ask.update})
    raise RefusedError(f"Update {ask.update} has ended ({ended.outcome}), so it cannot be withdrawn.", status=409)


def _answer_ended(fleet: Fleet, update: str) -> Answer:
    ended = _find_ended(fleet, update)
    if ended.outcome not in (UpdateOutcome.COMMITTED, UpdateOutcome.PARTIAL):
        raise RefusedError(f"Update {update} was given up: {ended.message or ended.outcome}", status=409)
    details: dict[str, object] = {"update": update, "version": str(ended.version), "outcome": ended.outcome.value, "state": "committed"}
    details |= {"epoch": fleet.epoch, "committed": ended.version.model_dump(mode="json")}
    committed = fleet.weights.staged
    details |= {"digest": committed.digest} if committed is not None and committed.update == update else {}
    details |= {"unchecked": {"what": [NAMES_AND_SHAPES], "why": ended.unchecked}} if ended.unchecked else {}
    if ended.reason is UpdateReason.TOO_FEW_ENGINES:
        return Answer(500, ended.message, {**details, "reason": ended.reason.value})
    return Answer(200, f"Success: {ended.message}" if ended.message else "Success", details)


def _find_ended(fleet: Fleet, update: str) -> EndedUpdate:
    """Return how an update ended. Raises RefusedError if it is not known."""
    last = fleet.last_update
    known = [*([last] if last is not None else []), *fleet.transaction.earlier]
    found = next((ended for ended in known if ended.update == update), None)
    if found is None:
        raise RefusedError(f"There is no update {update}: it was never begun, or it ended long ago. Begin another one.", status=404)
    return found
