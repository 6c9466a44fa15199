"""Killing what runs, on purpose: seeded kills of every component beside a run, each proven to have hit work."""
