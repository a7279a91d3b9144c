"""Errors of extractors and their inputs.

    ExtractError
    +-- InputError (ValueError)             the item's data can't be used; quarantined under its class name
    |   +-- MissingFile, TruncatedFile, UnsupportedFile, EmptyInput, InvalidValues
    |   +-- DecodeError                     a decoder gave up on the data
    |   +-- NoFaces, NoColors               a mesh lacks what this stage needs
    +-- WeightsError (ValueError)           a checkpoint is not what this network needs; stops the stage
    +-- WeightsChanged                      a checkpoint was replaced while the run went on; stops the stage
    +-- ChildDied (RuntimeError)            a helper process crashed
    |   +-- DeadlineExceeded, MemoryCapExceeded
    +-- MissingPackage (ImportError)        an optional package is not installed

An InputError concerns one item: it is recorded and the job goes on. A WeightsError, WeightsChanged or
MissingPackage concerns every item of the stage: the stage stops with it at once.
"""


class ExtractError(Exception):
    """Base of all errors of `extractors`."""


class InputError(ExtractError, ValueError):
    """An item's data can't be used."""


class MissingFile(InputError):
    """A file that the item needs is not there."""


class TruncatedFile(InputError):
    """A file ends before its own header says it should."""


class UnsupportedFile(InputError):
    """A file of a format, version or dialect that is not read."""


class EmptyInput(InputError):
    """Zero bytes, zero vertices, zero frames."""


class InvalidValues(InputError):
    """NaN, infinite or out-of-range values where numbers are needed."""


class DecodeError(InputError):
    """A decoder gave up on the data."""


class NoFaces(InputError):
    """A mesh without faces where a surface is needed."""


class NoColors(InputError):
    """A mesh without colours where colours are needed."""


class WeightsError(ExtractError, ValueError):
    """A checkpoint does not fit the network, or can't be read safely."""


class WeightsChanged(ExtractError):
    """A checkpoint is no longer the file that the plan saw."""


class ChildDied(ExtractError, RuntimeError):
    """A helper process crashed while it worked on the item."""


class DeadlineExceeded(ChildDied):
    """A helper process did not answer in time and was killed."""


class MemoryCapExceeded(ChildDied):
    """A helper process grew over its memory cap and was killed."""


class MissingPackage(ExtractError, ImportError):
    """An optional package is needed and not installed; the text has the pip command."""
