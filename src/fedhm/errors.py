"""The one error that a user can cause: a sentence that says what is wrong and what to do."""


class FedhmError(Exception):
    """Raised for wrong input, missing data, damaged files. The CLI prints it without a traceback."""
