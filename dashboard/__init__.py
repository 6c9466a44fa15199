"""Runs, groups and episodes in a browser: live from Postgres (needs the extra `dashboard`), or as files.

Invariant: pages are templates with escaping on (`html`), filled from rows; nothing here writes to the store.
"""
