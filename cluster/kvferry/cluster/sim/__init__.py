"""The deterministic simulator: the real services in one thread, on virtual time, with faults."""
