"""The dev stack: Temporal, Postgres, an engine and workers on one machine, held by a supervisor process.

Invariant: everything that was started is written in the state file (pid and start time) before anyone relies on
it, so that whatever dies, the next command can stop what is left over and nothing else.
"""
