"""The one error that a user can cause, and the one warning: a sentence that says what is wrong and what to do."""


class FedhmWarning(UserWarning):
    """Given for what a run can live with, but its user should know. The CLI prints it as one sentence."""


class FedhmError(Exception):
    """Raised for wrong input, missing data, damaged files. The CLI prints it without a traceback."""
