"""Errors that a user of the command line can mend."""


class JobError(ValueError):
    """A job, an option or an override can't be used as given; the text says what is expected."""
