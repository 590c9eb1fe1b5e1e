"""Proofs that a BLAS keeps the promise: a row's bits depend on no other row, and on no compiler."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator

import numpy as np

# CBLAS's numbers.
_ROW_MAJOR = 101
_AS_STORED = 111
_TRANSPOSED = 112

# Rows, columns and depth of the products: depths of every remainder by 4, one above the 2,048 that
# `blas_shim.c` sums at once, and rows that it multiplies another way.
_SHAPES = (
    (2, 7, 5),
    (3, 33, 66),
    (5, 16, 67),
    (8, 40, 64),
    (16, 33, 65),
    (17, 9, 2051),
    (65, 21, 19),
)
# SHA-256 of all products by `blas_shim.c`, of every compiler and for every width of vectors.
_DIGEST = "230e8cd230b977365ca09536eccc3ebad4e8ccb7244782cb1f347dc9a68ad460"


def dependent_rows(library: ctypes.CDLL) -> str | None:
    """What is wrong if a row of a product has other bits than that row multiplied alone.

    None if nothing is wrong.
    """
    for left, right, transposed in _matrices():
        product = _multiply(library, left=left, right=right, transposed=transposed)
        for row in range(len(left)):
            alone = _multiply(library, left=left[row : row + 1], right=right, transposed=transposed)
            if alone.tobytes() != product[row].tobytes():
                return "a row of a product depends on the other rows"
    return None


def other_bits(library: ctypes.CDLL) -> str | None:
    """What is wrong if the products of our library have other bits than on other machines.

    None if nothing is wrong.
    """
    digest = hashlib.sha256()
    for left, right, transposed in _matrices():
        digest.update(_multiply(library, left=left, right=right, transposed=transposed).tobytes())
    if digest.hexdigest() != _DIGEST:
        return "its products have other bits than on other machines"
    return None


def _matrices() -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Left [m, k], right [k, n] or [n, k], and whether right is transposed. All are f32."""
    for rows, columns, depth in _SHAPES:
        left = _numbers(rows * depth).reshape(rows, depth)
        right = _numbers(columns * depth)
        yield left, right.reshape(depth, columns), False
        yield left, right.reshape(columns, depth), True


def _numbers(count: int) -> np.ndarray:
    """`count` numbers from -1 to 1, of 24 random bits each: f32, the same on every machine."""
    # An integer hash of 1, 2, 3 and so on.
    bits = np.arange(1, count + 1, dtype=np.uint32) * np.uint32(2654435761)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(2246822519)
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def _multiply(
    library: ctypes.CDLL, left: np.ndarray, right: np.ndarray, transposed: bool
) -> np.ndarray:
    """left [m, k] @ right [k, n], or left @ right.T with right [n, k]: [m, n], f32."""
    rows, depth = left.shape
    columns = right.shape[0] if transposed else right.shape[1]
    product = np.empty((rows, columns), np.float32)
    library.cblas_sgemm(
        _ROW_MAJOR,
        _AS_STORED,
        _TRANSPOSED if transposed else _AS_STORED,
        rows,
        columns,
        depth,
        ctypes.c_float(1),  # alpha
        ctypes.c_void_p(left.ctypes.data),
        depth,
        ctypes.c_void_p(right.ctypes.data),
        right.shape[1],
        ctypes.c_float(0),  # beta
        ctypes.c_void_p(product.ctypes.data),
        columns,
    )
    return product
