"""What the library raises. The texts name function, argument, what was got and was expected."""

from . import _core


class Error(Exception):
    """Base of everything the library raises."""


class InvalidArgument(Error, ValueError):
    """The caller passed something wrong."""


class ShapeMismatch(InvalidArgument, RuntimeError):
    """Tensors that do not fit the metadata in a simulation; a RuntimeError in the original."""


class RankOutOfRange(InvalidArgument, IndexError):
    """A destination outside the world in a simulation; an IndexError in the original."""


class NotThreeAxes(InvalidArgument, AssertionError):
    """A simulated tensor without three axes; an AssertionError in the original."""


class Unsupported(Error, NotImplementedError):
    """The request is well formed, but this build cannot serve it."""


class IoError(Error, OSError):
    """A file or text could not be read, parsed or written."""


class InternalError(Error, RuntimeError):
    """A defect of the library, never of the caller."""


_core.set_error_types(Error, InvalidArgument, Unsupported, IoError, InternalError)

for _error in (
    Error,
    InvalidArgument,
    ShapeMismatch,
    RankOutOfRange,
    NotThreeAxes,
    Unsupported,
    IoError,
    InternalError,
):
    _error.__module__ = "waybill"  # what users see and catch
