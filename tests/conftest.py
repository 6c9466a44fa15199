"""Fixtures that every test may ask for."""

from .support.stack import database_url, databases, embedded_stack, fresh_database, temporal_address

__all__ = ["database_url", "databases", "embedded_stack", "fresh_database", "temporal_address"]
