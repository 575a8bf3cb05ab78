"""A Fetch whose frames go over a bulk socket: the call carries the offer and the status."""

from collections.abc import Generator, Iterator
from dataclasses import replace

import grpc

from kvferry.proto.errors import UnavailableError
from kvferry.worker.bulk_listener import BulkListener
from kvferry.worker.bulk_wire import send_frame
from kvferry.worker.frames import BulkOffer, Header
from kvferry.worker.outgoing import OutgoingFrame
from kvferry.worker.stall_watch import StallWatch
from kvferry.worker.transfer_wire import encode_header

# Below this a connection costs more than it brings (docs/decisions/0011).
MIN_BULK_BYTES = 1 << 20


def worth_a_socket(header: Header) -> bool:
    """Return whether what follows the header is enough for a connection of its own."""
    num_bytes = header.num_found * header.geometry.block_bytes
    return header.offer is None and num_bytes >= MIN_BULK_BYTES


def send_bulk(
    listener: BulkListener,
    header: Header,
    parts: Iterator[Header | OutgoingFrame],
    context: grpc.ServicerContext,
    watch: StallWatch,
) -> Generator[bytes, None, None]:
    """Yield the header with an offer; then send the frames to whoever takes it.

    Raises:
        DeadlineError: nobody took it.
        UnavailableError: the receiver closed the connection.
        KvferryError: what reading the frames raised.
    """
    with listener.ticket() as ticket:
        offer = BulkOffer(port=listener.port, ticket=ticket.secret)
        yield encode_header(replace(header, offer=offer))
        # The end of the call, for whatever reason, ends a wait for the receiver.
        if not context.add_callback(ticket.void):
            return
        connection = ticket.wait()
        if connection is None:
            return
        for part in parts:
            assert isinstance(part, OutgoingFrame)
            try:
                send_frame(connection, part)
            except OSError as error:
                raise UnavailableError("the bulk connection broke", given=str(error)) from error
            watch.moved()
