"""The words all floors share: messages, ids, states, reasons, the run file, the pure flow of an episode, and the typed
name, input, result and options of every activity. Pydantic and the standard library only; no I/O.
"""
