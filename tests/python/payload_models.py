"""An independent model of the formats of rows: numpy, and the casts of torch and of ml_dtypes."""

import ml_dtypes
import numpy as np
import torch


def cast(values, dtype):
    """The codes of torch's cast of float32 numbers."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype).view(torch.uint8)


def model_of_powers(rows, group, element, emax, largest, fits):
    """Scales that are powers of two, in float64: the OCP rule, or the least that fits."""
    x = rows.astype(np.float64).reshape(len(rows), -1, group)
    most = np.abs(x).max(-1)
    good = np.isfinite(most)
    top = np.where(good & (most > 0), most, 1.0)
    if fits:
        exponent = np.ceil(np.log2(top / largest))
        exponent += (top / largest > 2.0**exponent) - 1.0 * (top / largest <= 2.0 ** (exponent - 1))
    else:
        exponent = np.frexp(top)[1] - 1 - emax
    exponent = np.where(most == 0, -127, np.clip(exponent, -127, 127)).astype(np.int64)
    codes = np.where(good, exponent + 127, 255).astype(np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.clip(x / 2.0 ** exponent[..., None], -largest, largest)
    elements = cast(np.where(good[..., None], scaled, 0), element).numpy()
    elements = np.where(good[..., None], elements, 0x7F).astype(np.uint8)
    return elements.reshape(len(rows), -1), codes


def model_of_float8(rows):
    x = rows.astype(np.float32).reshape(len(rows), -1, 128)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = np.abs(x).max(-1) * np.float32(1 / 448)
        scaled = np.where(scales[..., None] == 0, np.float32(0), x / scales[..., None])
        clipped = np.clip(scaled, -448, 448)
    elements = cast(clipped, torch.float8_e4m3fn).numpy()
    elements = np.where(np.isnan(scaled), 0x7F, elements).astype(np.uint8)
    return elements.reshape(len(rows), -1), scales


def model_of_nvfp4(rows):
    x = rows.astype(np.float32).reshape(len(rows), -1, 16)
    most = np.abs(x).max(-1)
    good = np.isfinite(most)
    with np.errstate(invalid="ignore", divide="ignore"):
        row_scales = np.where(good, most, np.float32(0)).max(1) / np.float32(2688)
        ratio = most / np.float32(6) / row_scales[:, None]
        ratio = np.where(row_scales[:, None] == 0, np.float32(0), np.minimum(ratio, 448))
        groups = cast(np.where(good, ratio, 0), torch.float8_e4m3fn)
        unit = groups.view(torch.float8_e4m3fn).float().numpy() * row_scales[:, None]
        scaled = np.clip(x / unit[..., None], -6, 6)
    live = (unit > 0) & good
    # ml_dtypes rounds to nearest, ties to even.
    fours = np.where(live[..., None], scaled, 0).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    fours = np.where(live[..., None], fours & 0xF, 0).astype(np.uint8).reshape(len(rows), -1)
    codes = np.where(good, groups.numpy(), 0x7F).astype(np.uint8)
    return fours[:, ::2] | fours[:, 1::2] << 4, (codes, row_scales)


MODELS = {
    "float8": model_of_float8,
    "float8_ue8m0": lambda r: model_of_powers(r, 128, torch.float8_e4m3fn, 8, 448.0, True),
    "mxfp8": lambda r: model_of_powers(r, 32, torch.float8_e4m3fn, 8, 448.0, False),
    "mxfp8_e5m2": lambda r: model_of_powers(r, 32, torch.float8_e5m2, 15, 57344.0, False),
    "nvfp4": model_of_nvfp4,
}
