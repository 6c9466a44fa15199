"""The one exception of the dev stack."""


class StackError(Exception):
    """The dev stack cannot do what was asked; the message is one sentence that says what to do."""
