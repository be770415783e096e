"""Comparing results with the model."""

import numpy as np
from records import METADATA_FIELDS


def expect_same_array(face, what, got, want):
    """Same kind, dtype, shape, elements; None is None."""
    if want is None:
        assert got is None, what
        return
    assert isinstance(got, face.array_type), what
    assert face.dtype_name(got) == want.dtype.name, what
    assert tuple(got.shape) == want.shape, what
    np.testing.assert_array_equal(face.host(got), want, err_msg=what)


def expect_same_metadata(face, what, got, want):
    """Every field against the model's."""
    for name in METADATA_FIELDS:
        value, expected = getattr(got, name), getattr(want, name)
        if isinstance(expected, np.ndarray):
            expect_same_array(face, f"{what}.{name}", value, expected)
        else:
            assert type(value) is type(expected) and value == expected, f"{what}.{name}"


def as_metadata(face, m):
    """Metadata of the face from the model's fields."""
    values = {name: getattr(m, name) for name in METADATA_FIELDS}
    return face.module.Metadata(
        **{n: face.array(v) if isinstance(v, np.ndarray) else v for n, v in values.items()}
    )
