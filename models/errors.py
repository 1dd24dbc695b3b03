"""The one error that a person who loads a model can meet.

Its message is whole: what was asked for, what was wrong, and the way out. Scripts print it as it stands and exit with
status 2; nobody needs the traceback.
"""


class ModelError(ValueError):
    """A model, checkpoint, tokenizer or cache folder cannot be used as it is; the message says what to do."""
