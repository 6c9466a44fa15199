"""Fixtures that every test may ask for."""

import signal

from .support.stack import database_url, databases, embedded_stack, fresh_database, temporal_address

__all__ = ["database_url", "databases", "embedded_stack", "fresh_database", "temporal_address"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started as a shell's background job; what the tests start would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
