"""The frames around KV events: live messages, requests for a replay, and its replies.

| what | frames | since |
|---|---|---|
| live message | `[topic] [seq] [payload]` | |
| request for a replay from `seq` on | `[] [seq]` | |
| reply, `plain` | `[] [seq] [payload]`, at the end `[] [-1] []` | vLLM 0.17 |
| reply, `topic` | `[] [topic] [seq] [payload]`, at the end `[] [] [-1] []` | vLLM 0.26 |

`seq` is 8 bytes, big-endian; `[]` is the empty frame that a REQ socket puts first and a DEALER has
to write itself. The identity that a ROUTER puts before them is not shown.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvferry.proto.errors import BadInputError

ReplayForm = Literal["plain", "topic"]

SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
"""The number -1 in the place of a sequence number."""


class Numbered(NamedTuple):
    """One message: the payload of batch `seq`. `topic` is None where the form leaves it out."""

    topic: bytes | None
    seq: int
    payload: bytes


def seq_to_bytes(seq: int) -> bytes:
    """Return a sequence number as its frame; `0 <= seq < 2**64 - 1`."""
    return seq.to_bytes(SEQ_BYTES, "big")


def seq_from_bytes(frame: bytes) -> int:
    """Return the sequence number of a frame.

    Raises:
        BadInputError: the frame is not 8 bytes long.
    """
    if len(frame) != SEQ_BYTES:
        raise BadInputError(
            "a sequence number of a wrong length", given=len(frame), allowed=f"{SEQ_BYTES} bytes"
        )
    return int.from_bytes(frame, "big")


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames of one live message."""
    return [topic, seq_to_bytes(seq), payload]


def read_live(frames: Sequence[bytes]) -> Numbered:
    """Return the message of live frames.

    Raises:
        BadInputError: not three frames with a sequence number second.
    """
    if len(frames) != 3:
        raise BadInputError(
            "a live message of a wrong form", given=len(frames), allowed="topic, seq and payload"
        )
    return Numbered(frames[0], seq_from_bytes(frames[1]), frames[2])


def replay_frames(form: ReplayForm, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames of one reply."""
    return [b"", *([topic] if form == "topic" else []), seq_to_bytes(seq), payload]


def end_frames(form: ReplayForm) -> list[bytes]:
    """Return the frames of the reply that ends a replay."""
    return [b"", *([b""] if form == "topic" else []), END_OF_REPLAY, b""]


def read_replay(frames: Sequence[bytes]) -> Numbered | None:
    """Return the message of a reply of either form, or None at the end of the replay.

    Raises:
        BadInputError: of neither form.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise BadInputError(
            "a reply of a wrong form", given=len(frames), allowed="[], [topic], seq and payload"
        )
    if frames[-2] == END_OF_REPLAY:
        return None
    topic = frames[1] if len(frames) == 4 else None
    return Numbered(topic, seq_from_bytes(frames[-2]), frames[-1])
