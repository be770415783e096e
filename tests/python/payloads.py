"""Payload arrays of any dtype and strides, made from integers so that every bit is known."""

import numpy as np

#: dtype name -> bytes of an element; the last four are not numpy's own.
DTYPES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(rng, shape, dtype):
    """Random integers of the dtype's size; 0 and 1 for bool."""
    kind = BITS[DTYPES[dtype]]
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(kind)
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max, shape, dtype=kind, endpoint=True)


def as_dtype(face, values, dtype):
    """The face's array of a dtype over the memory of its integers."""
    if face.name == "torch":
        return values.view(getattr(face.torch, dtype))
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes  # numpy has no such types without it

        return values.view(getattr(ml_dtypes, dtype))
    return values.view(dtype)


def laid_out(face, values, order, steps):
    """(view, memory): ``values`` with axes stored in ``order`` and gaps of ``steps`` elements.

    Negative steps store an axis backwards. The gaps are filled with -7.
    """
    extents = [values.shape[axis] * abs(steps[axis]) for axis in order]
    memory = face.array(np.full(extents, -7, values.dtype))
    picked = memory[tuple(slice(None, None, steps[axis]) for axis in order)]
    view = (
        picked.transpose(np.argsort(order))
        if face.name == "numpy"
        else picked.permute(*map(int, np.argsort(order)))
    )
    view[...] = face.array(values)
    return view, memory
