"""Atropos."""
