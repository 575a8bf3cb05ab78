"""What a coordinator counts in its life."""

# Shown from the start, so that a reader can tell "never" from "not counted".
COUNTERS = (
    "preemptions",
    "cancelled_loads",
    "failed_loads",
    "repeated_loads",
    "loads_ahead",
    "expired_leases",
    "expired_reservations",
    "handoffs_done",
    "handoffs_failed",
    "handoffs_expired",
    "handoffs_without_taker",
    "drains",
    "drained_blocks",
    "drained_bytes",
    "warmed_blocks",
    "warmed_bytes",
    "failed_moves",
    "resets",
    "returns",
    "suspects",
    "deaths",
    "ignored_messages",
)
