"""Settings of every gRPC server and channel; both ends must agree on the message limit."""

# Each end checks on its own; gRPC's default is 4 MiB. A frame's payload is at most half of it.
MAX_MESSAGE_BYTES = 64 << 20

# What gRPC refuses no handler hears of; so of what is a little too large the server tells itself.
SERVER_SLACK_BYTES = 4 << 20

_BOTH: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Frames of a megabyte travel faster when HTTP/2 does not cut them into 16 KiB.
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS = (
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + SERVER_SLACK_BYTES),
    # Otherwise a second process on the same port takes half of the connections, silently.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.http2.max_ping_strikes", 0),
)

CHANNEL_OPTIONS = (
    *_BOTH,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A channel opened after a peer's restart must not inherit the old one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # An HTTP proxy in the environment is not meant for traffic inside the cluster.
    ("grpc.enable_http_proxy", 0),
)
