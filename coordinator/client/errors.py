"""What the client raises.

::

    CoordinatorError
    ├── NotConfigured            no address or token was given or found
    ├── Unreachable              no answer within the time for retries
    ├── UnexpectedAnswer         an answer that this version of the client does not understand
    ├── ArtifactCorrupt          a downloaded artifact is not what its manifest and hash say
    ├── NotActivated             an activation failed, was given up, or is still open after the wait
    └── Refused                  the coordinator said no: code, status, detail, next_step
        ├── UpdateFenced         the update is not open any more: discard the step
        ├── LeaseExpired         the update's lease has ended: discard the step
        ├── LineConflict         the weights do not contain the last commit: load the newest checkpoint
        └── DriftSuspect         most of every worker's rollouts drifted: look at the alignment
"""

from __future__ import annotations

from pydantic import ValidationError

from coordinator.client.waiting import unconfirmed, waits_for
from coordinator.wire.policies import ActivationView
from coordinator.wire.problems import ProblemDocument


class CoordinatorError(Exception):
    """Everything that the client raises about the coordinator."""


class NotConfigured(CoordinatorError):
    """No address or no token was given, and none was found."""


class Unreachable(CoordinatorError):
    """The coordinator gave no answer within the time for retries. Nothing is known of the call's effect;
    every call is safe to repeat."""


class UnexpectedAnswer(CoordinatorError):
    """The answer does not fit its model, as when client and server are of different versions."""


class ArtifactCorrupt(CoordinatorError):
    """The bytes of an artifact are not the ones that its manifest names, or the manifest is not the
    hash's."""


class NotActivated(CoordinatorError):
    """An activation ended without the switch, or is still open after the wait; the text names the workers that hold
    it back, `activation` has all of them."""

    def __init__(self, activation: ActivationView) -> None:
        self.activation = activation
        ended = activation.state not in ("waiting", "open")
        why = [activation.reason] if activation.reason else []
        if not ended:
            why.append(f"it waits for {waits_for(activation)}")
        elif unconfirmed(activation):
            why.append(f"not confirmed by {unconfirmed(activation)}")
        super().__init__(
            f"version {activation.version} is not active: activation {activation.activation_id} is "
            + "; ".join([activation.state, *why])
        )


class Refused(CoordinatorError):
    """The coordinator refused the call. `document` is the whole problem document (RFC 9457)."""

    def __init__(self, document: ProblemDocument) -> None:
        self.document = document
        self.code = document.code
        self.status = document.status
        self.detail = document.detail
        self.next_step = document.next_step
        self.field = document.field
        self.item = document.item
        where = "".join(f" [{name} {value}]" for name, value in (("field", self.field), ("item", self.item)) if value)
        super().__init__(f"{self.code} ({self.status}){where}: {self.detail}; {self.next_step}".rstrip("; "))


class UpdateFenced(Refused):
    """The update is not open: committed, aborted, expired or fenced. Discard the step and open another."""


class LeaseExpired(Refused):
    """The update's lease has ended. Discard the step and open another."""


class LineConflict(Refused):
    """The weights do not contain the last commit of the surviving line."""


class DriftSuspect(Refused):
    """Of every worker more than half drifted beyond the limit. Check that the current log-probs are
    aligned."""


_BY_CODE: dict[str, type[Refused]] = {
    "update_fenced": UpdateFenced,
    "lease_expired": LeaseExpired,
    "line_conflict": LineConflict,
    "drift_suspect": DriftSuspect,
}


def told(fault: Exception) -> str:
    """A fault of the connection in words, with the way out of the one that trying again does not mend."""
    text = f"{type(fault).__name__}: {fault}".rstrip(": ")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        text += "; SSL_CERT_FILE names the certificate of an authority of your own"
    return text


def refusal(status: int, body: bytes) -> Refused:
    """The exception for an answer of status 400 or more, whoever sent it."""
    try:
        document = ProblemDocument.model_validate_json(body)
    except ValidationError:
        # Not the coordinator's own: a proxy in between, or another server at this address.
        document = ProblemDocument(
            type="about:blank",
            title="Not an answer of the coordinator",
            status=status,
            code="foreign_answer",
            detail=f"HTTP {status} without a problem document: {body[:200]!r}.",
            next_step="Check the address, and any proxy on the way.",
        )
    return _BY_CODE.get(document.code, Refused)(document)
