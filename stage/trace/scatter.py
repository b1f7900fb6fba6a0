"""Writing short fields at many places of an array of bytes at once.

A field of some bytes is written as a word, through a view of the bytes in which each byte begins a word: one indexed
copy for up to four bytes at a place, where a copy for each byte takes three times as long.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scatter", "digit_words", "varint_words"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Words = NDArray[np.unsignedinteger[Any]]

SIZES = (4, 2, 1)


class Scatter:
    """Bytes to write into."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.bytes = data, data.data
        self._views = {
            size: np.ndarray((max(0, len(data) - size + 1),), f"<u{size}", data.data, 0, (1,))
            for size in SIZES
        }

    def put(self, at: Ints, positions: Ints, words: Words, width: int) -> None:
        """Write a word of `width` bytes, the lowest first, at each of the positions behind each place of `at`.

        `words` has a row for each place, and a column for each position or one for all.

        >>> scatter = Scatter(np.zeros(6, np.uint8))
        >>> scatter.put(np.array([0, 3]), np.array([1]), np.array([[0x0201], [0x0403]], np.uint64), 2)
        >>> scatter.data.tolist()
        [0, 1, 2, 0, 3, 4]
        """
        where, done = at[:, None] + positions, 0
        for size in SIZES:
            while width - done >= size:
                view = self._views[size]
                rest = words >> words.dtype.type(8 * done) if done else words
                view[where + done if done else where] = rest.astype(view.dtype, copy=False)
                done += size


def varint_words(values: Words, width: int) -> Words:
    """Numbers as varints padded to a width of up to 4 bytes, or 8 where they are 64 bits wide.

    >>> [hex(word) for word in varint_words(np.array([1, 300], np.uint32), 3).tolist()]
    ['0x8081', '0x82ac']
    """
    kind = values.dtype.type
    words = values & kind(0x7F)
    for k in range(1, width):
        words |= (values << kind(k)) & kind(0x7F << 8 * k)
    words |= kind(sum(0x80 << 8 * k for k in range(width - 1)))
    return words


def digit_words(numbers: Words, count: int) -> Words:
    """Numbers as text of `count` digits, at most 8.

    >>> int(digit_words(np.array([42], np.uint64), 3)[0]).to_bytes(3, "little")
    b'042'
    """
    words = np.zeros(numbers.shape, np.uint64)
    for k in range(count):
        digit = numbers // np.uint64(10 ** (count - 1 - k)) % np.uint64(10) + np.uint64(ord("0"))
        words |= digit << np.uint64(8 * k)
    return words
