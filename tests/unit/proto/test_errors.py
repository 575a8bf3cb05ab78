import json
import pickle

import pytest

from kvferry.proto.errors import (
    BadInputError,
    BusyError,
    DeadlineError,
    InvariantError,
    KvferryError,
    NotFoundError,
    SchemeMismatchError,
    class_named,
)

GRPC_STATUS_NAMES = {
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
}


def tree(cls: type[KvferryError]) -> list[type[KvferryError]]:
    return [cls, *(sub for direct in cls.__subclasses__() for sub in tree(direct))]


every_error = pytest.mark.parametrize("cls", tree(KvferryError), ids=lambda cls: cls.__name__)


@every_error
def test_an_error_survives_pickling_whole(cls: type[KvferryError]) -> None:
    error = cls("what is wrong", given={"a": 1}, allowed=["b", 2])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.message, copy.given, copy.allowed) == ("what is wrong", {"a": 1}, ["b", 2])
    assert str(copy) == str(error) == "what is wrong; given: a=1; allowed: ['b', 2]"


@every_error
def test_an_error_has_a_status_that_grpc_knows(cls: type[KvferryError]) -> None:
    assert cls.grpc_status in GRPC_STATUS_NAMES


@every_error
def test_bad_input_and_nothing_else_ends_the_command_line_with_2(cls: type[KvferryError]) -> None:
    assert cls.exit_code == (2 if issubclass(cls, BadInputError) else 1)


@every_error
def test_bad_input_is_never_worth_a_retry(cls: type[KvferryError]) -> None:
    assert not (issubclass(cls, BadInputError) and cls.retryable)


def test_the_tree_in_the_documentation_is_the_tree_in_the_code() -> None:
    import kvferry.proto.errors as module

    drawn = {
        line.split("── ")[1].split()[0]
        for line in str(module.__doc__).splitlines()
        if "── " in line
    }
    assert drawn | {"KvferryError"} == {cls.__name__ for cls in tree(KvferryError)}


@every_error
def test_an_error_is_found_by_the_name_of_its_class(cls: type[KvferryError]) -> None:
    assert class_named(cls.__name__) is cls


def test_a_name_that_no_error_has_stands_for_none() -> None:
    assert class_named("Cancelled") is None


def test_an_error_without_values_is_its_message() -> None:
    assert str(BusyError("too many requests")) == "too many requests"


def test_a_given_value_that_is_false_is_still_shown() -> None:
    assert str(BusyError("no", given=0, allowed="")) == "no; given: 0; allowed: "


def test_the_json_form_carries_type_message_and_both_values() -> None:
    error = SchemeMismatchError("differs", given={"seed": "1"}, allowed={"seed": "0"})
    assert json.loads(json.dumps(error.to_json())) == {
        "type": "SchemeMismatchError",
        "message": "differs",
        "given": {"seed": "1"},
        "allowed": {"seed": "0"},
    }


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (BadInputError, ValueError),
        (NotFoundError, LookupError),
        (DeadlineError, TimeoutError),
        (InvariantError, AssertionError),
    ],
)
def test_errors_are_also_the_builtin_error_a_python_programmer_expects(
    cls: type[KvferryError], builtin: type[Exception]
) -> None:
    assert issubclass(cls, builtin)
