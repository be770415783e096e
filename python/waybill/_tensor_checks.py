"""What is wrong with the tensors of a call, in the words of the caller: names and shapes."""

from __future__ import annotations

from typing import Any, Callable, NoReturn, Optional, Sequence

from .errors import InvalidArgument

#: The name of the caller's tensor at a place.
Names = Callable[[int], str]


def numbered(name: str) -> Names:
    """Of tensors that come as one sequence."""
    return lambda t: f"{name}[{t}]"


def of_qkv(t: int) -> str:
    """Of Q and one or two tensors behind it."""
    return "q" if t == 0 else f"kv[{t - 1}]"


def refuse(
    who: str,
    error: InvalidArgument,
    names: Names,
    values: Sequence[Any],
    formats: Sequence[Any],
    rows: Sequence[int],
    any_dtype: bool = False,
) -> NoReturn:
    """Raises what the compiled part has found wrong, which saw matrices and gave them its names.

    :param formats, rows: of each tensor: TensorFormat, and the least rows
    :param any_dtype: of results, which may be wider than what is summed
    """
    if type(error) is InvalidArgument:
        if len(values) != len(formats):
            raise InvalidArgument(
                f"{who}: got {len(values)} tensors, expected {len(formats)}, as many as the plan"
            ) from None
        for t, (value, format_) in enumerate(zip(values, formats)):
            found = _wrong(value, format_, rows[t], any_dtype)
            if found is not None:
                raise InvalidArgument(f"{who}: {names(t)} {found}") from None
    raise error from None


def _wrong(value: Any, format_: Any, rows: int, any_dtype: bool) -> Optional[str]:
    shape = list(value.shape)
    row = ", ".join(str(extent) for extent in format_.row_shape)
    elements = 1
    for extent in shape[1:]:
        elements *= extent
    if elements != format_.hidden:
        return f"has shape {shape}, expected [rows, {row}], as in the plan"
    if not any_dtype and value.dtype != format_.dtype:
        return f"has dtype {value.dtype}, expected {format_.dtype}, as in the plan"
    if shape[0] < rows:
        return f"has shape {shape}, expected at least {rows} rows"
    return None
