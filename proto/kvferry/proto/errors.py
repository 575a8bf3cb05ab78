"""Every error kvferry raises, as one tree.

    KvferryError
    ├── BadInputError               the caller gave something that can never work (CLI exit code 2)
    │   ├── ConfigError             a setting is wrong or two settings contradict each other
    │   ├── TokenError              a token id that cannot be hashed
    │   ├── ModelError              a model that cannot be found or is of an unsupported kind
    │   ├── PromptTooLongError      longer than the model's limit
    │   ├── NeverFitsError          a request larger than the whole pool
    │   ├── InsecureBindError       a non-loopback bind without credentials or --insecure
    │   ├── CredentialsError        a certificate or token that one side does not take
    │   ├── MessageTooLargeError    a message beyond what one side takes
    │   ├── PortTakenError          another process listens on the port
    │   ├── ResourcesError          the cluster cannot place what was asked for
    │   └── MismatchError           two sides that must agree do not; both values are shown
    │       ├── SchemeMismatchError     hash algorithm, NONE_HASH, key format or hash block
    │       └── IdentityMismatchError   model, weights, dtype, heads, groups ...
    ├── StaleError                  a message from an earlier life of its sender or receiver
    │   └── NotRegisteredError      the coordinator does not know the sender, which must come back
    ├── NotFoundError               an instance, request, lease or reservation that is not known
    ├── UnavailableError            a peer that does not answer; may work later or elsewhere
    │   ├── InstanceDiedError       an instance's process is gone; names the instance
    │   └── RestoringError          an instance has come back and not yet told all that it holds
    ├── BusyError                   over an admission limit; try again later
    ├── DeadlineError               a wait ended without an answer
    ├── TransferError               bytes that did not arrive whole and right
    └── InvariantError              kvferry itself is broken; both sides of the sum are shown

`given` is what was found, `allowed` is what would have been accepted. Both must be plain values
(they travel as JSON and through pickle).
"""

from typing import Any, ClassVar


class KvferryError(Exception):
    """Base of all errors of kvferry.

    Args:
        message: what was asked and what is wrong, one sentence without the values below.
        given: the offending value or values.
        allowed: what would have been accepted.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, given: Any = None, allowed: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.given = given
        self.allowed = allowed

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would drop the keyword arguments, and an error that cannot be
        # unpickled cannot cross Ray.
        return (_rebuild, (type(self), self.message, self.given, self.allowed))

    def __str__(self) -> str:
        text = self.message
        if self.given is not None:
            text += f"; given: {_shown(self.given)}"
        if self.allowed is not None:
            text += f"; allowed: {_shown(self.allowed)}"
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the object printed by `--json` runs and carried in gRPC trailers."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "given": self.given,
            "allowed": self.allowed,
        }


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def _rebuild(cls: type[KvferryError], message: str, given: Any, allowed: Any) -> KvferryError:
    return cls(message, given=given, allowed=allowed)


class BadInputError(KvferryError, ValueError):
    """The caller gave something that can never work."""

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2


class ConfigError(BadInputError):
    """A setting is wrong, or two settings contradict each other."""


class TokenError(BadInputError):
    """A token id that cannot be hashed."""


class ModelError(BadInputError):
    """A model that cannot be found, read, or is of an unsupported kind."""


class PromptTooLongError(BadInputError):
    """A prompt (with the tokens to generate) longer than the model's limit."""


class NeverFitsError(BadInputError):
    """A request that needs more blocks than the pool has; `given` holds both numbers."""


class InsecureBindError(BadInputError):
    """A bind beyond loopback without credentials or `--insecure`."""


class CredentialsError(BadInputError):
    """One side does not take the other's certificate or token, or only one of them speaks TLS."""

    grpc_status = "UNAUTHENTICATED"


class MessageTooLargeError(BadInputError):
    """A message of more bytes than one side takes; `given` and `allowed` hold both numbers."""

    grpc_status = "RESOURCE_EXHAUSTED"


class PortTakenError(BadInputError):
    """Another process listens on the port."""


class ResourcesError(BadInputError):
    """The cluster cannot place what was asked for."""

    grpc_status = "RESOURCE_EXHAUSTED"


class MismatchError(BadInputError):
    """Two sides that must agree do not; `given` and `allowed` hold the differing fields."""

    grpc_status = "FAILED_PRECONDITION"


class SchemeMismatchError(MismatchError):
    """Two hash schemes differ, so neither side could find the other's blocks."""


class IdentityMismatchError(MismatchError):
    """Two identities differ, so bytes are not interchangeable."""


class StaleError(KvferryError):
    """A message from an earlier life of its sender, or for an earlier life of its receiver."""

    grpc_status = "ABORTED"


class NotRegisteredError(StaleError):
    """The sender is no member in this life of the coordinator: it has to come back."""


class DrainedError(KvferryError):
    """An instance was drained: in this life it can never be a member again."""

    grpc_status = "FAILED_PRECONDITION"


class NotFoundError(KvferryError, LookupError):
    """An instance, request, lease or reservation that is not known (or no longer)."""

    grpc_status = "NOT_FOUND"


class UnavailableError(KvferryError):
    """A peer that does not answer; the call may or may not have run."""

    grpc_status = "UNAVAILABLE"
    retryable = True


class InstanceDiedError(UnavailableError):
    """The process of an instance is gone; `given` names the instance."""


class RestoringError(UnavailableError):
    """An instance has come back and not yet told all that it holds; `given` names it."""


class BusyError(KvferryError):
    """Over an admission limit; the caller may try again with jitter."""

    grpc_status = "RESOURCE_EXHAUSTED"
    retryable = True


class DeadlineError(KvferryError, TimeoutError):
    """A wait ended without an answer."""

    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class TransferError(KvferryError):
    """Bytes that did not arrive whole and right; nothing of them may be used."""

    grpc_status = "DATA_LOSS"
    retryable = True


class InvariantError(KvferryError, AssertionError):
    """Kvferry itself is broken: something that must always hold does not."""


def class_named(name: str) -> type[KvferryError] | None:
    """Return the error class of a name, None where this version has none."""
    return _CLASS_OF_NAME.get(name)


def _tree(root: type[KvferryError]) -> dict[str, type[KvferryError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_CLASS_OF_NAME = _tree(KvferryError)
