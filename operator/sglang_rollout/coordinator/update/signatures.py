"""Signed updates: unsigned updates are refused before an engine is called, and agents verify a signature before the fleet is paused. Pure.

The coordinator verifies no signature itself, because agents must not have to trust it.
"""

from __future__ import annotations

from sglang_rollout.coordinator.update.model import Fleet
from sglang_rollout.coordinator.update.phases import Update
from sglang_rollout.coordinator.update.requests import Begin, Body, CommitUpload, Upload
from sglang_rollout.coordinator.update.steps import PATIENCE_SECONDS, failures, same_body, send
from sglang_rollout.wire.ports import AGENT_SIGNATURE
from sglang_rollout.wire.reasons import RefusedError
from sglang_rollout.wire.signed import SIGNS_FIELD, SignedVersion
from sglang_rollout.wire.states import Version
from sglang_rollout.wire.trainer import Signing

UNSIGNED = (
    "This fleet accepts signed updates only (security.signatures), and this update is not signed. No engine was called. Push with the"
    " client of this project and its signing_key; trainers that cannot sign need a fleet without security.signatures."
)
UNSIGNED_GROUP = (
    "This fleet accepts signed updates only (security.signatures), and this trainer does not sign. No engine was called. Use the client of"
    " this project and its signing_key, as docs/how-to/sign-updates.md describes."
)
UNSIGNED_UPLOAD = (
    "This fleet accepts signed updates only (security.signatures), and this trainer does not sign. No update was begun. Use the client of"
    " this project and its signing_key; another client sends signs_updates: true here, and signed with the commit, as"
    " docs/how-to/sign-updates.md describes."
)
UNSIGNED_RESTORE = (
    "This fleet accepts signed updates only (security.signatures), and no trainer has signed the earlier version under its new number. No"
    " update was begun. Write the version into a folder with sglang-rollout weights export, and push it with the signing_key of a trainer."
)
NO_COPIES = (
    "The signature has the digest of a staged version, and the engines of this fleet load no copies (weights.transport is not Staged). Sign"
    " without a digest. No engine was called."
)
NO_VERIFIER = (
    "No engine that is up verifies signatures yet: engines that were started before security.signatures was set are being replaced."
    " Try again."
)


def needs_signatures(fleet: Fleet) -> bool:
    """Return True if the spec demands signatures, or a member still does after the spec has changed."""
    return fleet.signatures_demanded or bool(_verifiers(fleet))


def refuse_unsigned(fleet: Fleet, signed: SignedVersion | None) -> None:
    """Raise RefusedError for an update without a signature if the fleet demands signatures."""
    if signed is None and needs_signatures(fleet):
        raise RefusedError(UNSIGNED, status=403)


def refuse_trainer_without_key(fleet: Fleet, body: Body) -> None:
    """Raise RefusedError for the process group of a trainer that does not sign, before it pauses the fleet for a refused update."""
    if body.get(SIGNS_FIELD) is not True and needs_signatures(fleet):
        raise RefusedError(UNSIGNED_GROUP, status=403)


def refuse_upload_without_key(fleet: Fleet, ask: Upload) -> None:
    """Raise RefusedError for an upload that its trainer will not sign, before a byte moves."""
    if not ask.signs and needs_signatures(fleet):
        raise RefusedError(UNSIGNED_RESTORE if ask.source else UNSIGNED_UPLOAD, status=403)


def next_signing(fleet: Fleet, label: str | None) -> Signing | None:
    """Return what the signature of the next version must name; None if the fleet accepts unsigned updates."""
    if fleet.committed is None or not needs_signatures(fleet):
        return None
    return Signing(uid=fleet.uid, version=fleet.weights.next_version(label))


async def check_begin(fleet: Fleet, ask: Begin) -> SignedVersion | None:
    """Have all agents verify the signature of an update, and return what is signed; None if the fleet accepts unsigned updates."""
    signed = ask.signed
    if signed is not None and signed.digest and not fleet.is_staged:
        raise RefusedError(NO_COPIES)
    return await _check(fleet, signed, fleet.weights.next_version(signed.label if signed is not None else None))


async def check_commit(fleet: Fleet, ask: CommitUpload) -> SignedVersion | None:
    """Have all agents verify the signature of an upload, and return what is signed.

    None for a repeated call, for an upload that is not open, and if the fleet accepts unsigned updates.
    """
    update = fleet.update
    if update is None or update.staged is None or update.staged.id != ask.update:
        return None
    if update.signed is not None and update.signed == ask.signed:
        return None
    return await _check(fleet, ask.signed, fleet.target())


async def _check(fleet: Fleet, signed: SignedVersion | None, wanted: Version) -> SignedVersion | None:
    refuse_unsigned(fleet, signed)
    if signed is None or not needs_signatures(fleet):
        return None
    refuse_other_version(signed, wanted)
    names = _verifiers(fleet)
    if not names and fleet.is_staged and not fleet.members():
        return signed  # the agents verify it before an engine loads the version
    if not names:
        raise RefusedError(NO_VERIFIER, status=503)
    body = signed.model_dump(mode="json")
    limit = fleet.policy.deadlines.pause_seconds
    results = await send(AGENT_SIGNATURE, same_body(names, body), limit, patience=PATIENCE_SECONDS, idempotent=True)
    for name, result in failures(results).items():
        if result.status == 0 and fleet.is_staged and any(result.ok for result in results.values()):
            continue  # an engine that is lost is no reason to fail an update of its fleet
        message = f"engine {name} does not accept the signature: {result.message.rstrip('.')}. No engine has changed."
        raise RefusedError(message, status=result.status or 503, fleet={"engine": name})
    return signed


def refuse_other_version(signed: SignedVersion, wanted: Version) -> None:
    """Raise RefusedError unless the signed version is the one that the update becomes."""
    if signed.version != wanted:
        raise RefusedError(
            f"The signature is for version {signed.version} (label {signed.label}), and this update becomes version {wanted} (label"
            f" {wanted.label}). Read signing in GET /fleet?label={signed.label}, and sign again. No engine was called.",
            status=409,
        )


def compares_checksums(fleet: Fleet, update: Update, name: str) -> bool:
    """Return True if an engine's own agent compares the signed checksums before it acknowledges the version."""
    engine = fleet.engines[name]
    return update.signed is not None and engine.signed_only and engine.tensor_size in update.signed.checksums


def _verifiers(fleet: Fleet) -> list[str]:
    return [name for name, engine in fleet.members().items() if engine.signed_only]
