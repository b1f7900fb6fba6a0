"""Reading a table of a TOML file: typed values by key, and one line for what is wrong with one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stage.errors import StageError

__all__ = ["Reader", "reading"]

LARGEST = 10**18
"""Of a number in a file; units are chosen so that every real figure is far below."""


class Reader:
    """Takes the values of one table by key and remembers which were asked for.

    `where` begins every message, for example `system mine: [memory]`. A key that nothing asks for is an error at
    the end of `reading`, so a typo is never ignored.
    """

    def __init__(self, where: str, table: object, *, example: str = "") -> None:
        if not isinstance(table, dict):
            raise StageError(f"{where} is {table!r}; a table{example} is expected")
        self.where = where
        self.table: Mapping[str, Any] = table
        self.asked: dict[str, None] = {}

    def has(self, key: str) -> bool:
        """Whether an optional key is given."""
        self.asked[key] = None
        return key in self.table

    def value(self, key: str) -> Any:
        """Return what a key that must be there has."""
        if not self.has(key):
            raise StageError(f"{self.where} lacks the key {key!r}: add it")
        return self.table[key]

    def wrong(self, key: str, expected: str) -> StageError:
        """Return the error of a key whose value is not what is expected."""
        return StageError(f"{self.where} {key} is {self.table[key]!r}; {expected} is expected")

    def text(self, key: str) -> str:
        """Return a text of one line."""
        value = self.value(key)
        if not isinstance(value, str) or not value.strip() or "\n" in value:
            raise self.wrong(key, "a text of one line")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, which is not empty."""
        value = self.value(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        """Return one of the texts that are known."""
        if self.value(key) not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return str(self.table[key])

    def flag(self, key: str) -> bool:
        """Return whether an optional key is true."""
        if not self.has(key):
            return False
        if not isinstance(self.table[key], bool):
            raise self.wrong(key, "true or false")
        return bool(self.table[key])

    def integer(self, key: str, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self.value(key)
        if type(value) is not int or not least <= value <= LARGEST:
            raise self.wrong(key, f"an integer of at least {least}")
        return value

    def integers(self, key: str, length: int | None = None, least: int = 1) -> tuple[int, ...]:
        """Return a list of integers, `length` of them if that is given."""
        value = self.value(key)
        fits = isinstance(value, list) and value and length in {None, len(value)}
        if not fits or any(type(item) is not int or not least <= item <= LARGEST for item in value):
            many = "" if length is None else f"{length} "
            raise self.wrong(key, f"a list of {many}integers of at least {least}")
        return tuple(value)

    def number(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def numbers(self, known: tuple[str, ...]) -> dict[str, float]:
        """Return the numbers of a table whose keys are among the known ones, at least one of them."""
        found = {key: self.number(key) for key in known if self.has(key)}
        if not found:
            raise StageError(f"{self.where} is empty; give a number by {', '.join(known)}")
        return found

    def table_of(self, key: str) -> "Reader":
        """Return a reader of a table within this one."""
        return Reader(f"{self.where} [{key}]", self.value(key), example=f" [{key}]")


@contextmanager
def reading(reader: Reader) -> Iterator[Reader]:
    """Yield a reader, and raise at the end for a key of its table that was not asked for."""
    yield reader
    for key in reader.table:
        if key not in reader.asked:
            raise StageError(f"{reader.where} has the unknown key {key!r}; known: {', '.join(reader.asked)}")
