"""Errors that are the user's to mend."""


class UserError(ValueError):
    """Bad input: the message names the key, file or server and says what to change."""
