"""Typed reading of a Hugging Face `config.json`.

A model's `from_hf` reads keys through an `HFConfig`, which turns every surprise in a file that somebody else
wrote into one line that names the file and the key.

Invariants:
    * a value handed out has the type that was asked for (`true` is not an integer);
    * an integer handed out is at least `minimum`, 1 unless the reader says otherwise;
    * a key whose value is null counts as absent.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from stage.errors import ModelError

__all__ = ["HFConfig", "parse_config"]

T = TypeVar("T")
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class HFConfig(Mapping[str, object]):
    """A read-only mapping over the keys of one configuration file.

    >>> config = HFConfig({"hidden_size": 64, "head_dim": None}, "config.json")
    >>> config.require("hidden_size", int), config.get("head_dim", 16, int)
    (64, 16)
    >>> config.require("vocab_size", int)
    Traceback (most recent call last):
    stage.errors.ModelError: config.json: key 'vocab_size' is missing; the file must give an integer there
    """

    __slots__ = ("_prefix", "_values", "origin")

    def __init__(self, values: Mapping[str, object], origin: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.origin = origin

    def __repr__(self) -> str:
        return f"HFConfig({self.origin!r}, {len(self)} keys)"

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> object:
        if key not in self._values:
            raise self._error(key, "is missing")
        return self._values[key]

    @overload
    def get(self, key: str, default: None = None, /) -> object | None: ...
    @overload
    def get(self, key: str, default: object, /) -> object: ...
    @overload
    def get(self, key: str, default: None, kind: type[T], /, minimum: int = 1) -> T | None: ...
    @overload
    def get(self, key: str, default: T, kind: type[T], /, minimum: int = 1) -> T: ...
    def get(self, key: str, default: Any = None, kind: type[Any] | None = None, /, minimum: int = 1) -> Any:
        """The value of `key` as a `kind`, or `default` where the file has none (or null)."""
        value = self._values.get(key)
        if value is None:
            return default
        return value if kind is None else self._checked(key, value, kind, minimum)

    def require(self, key: str, kind: type[T], *, minimum: int = 1) -> T:
        """The value of `key` as a `kind`; a `ModelError` where it is missing, null or of another type."""
        value = self._values.get(key)
        if value is None:
            found = "is null" if key in self._values else "is missing"
            raise self._error(key, f"{found}; the file must give {_KINDS[kind]} there")
        return self._checked(key, value, kind, minimum)

    def section(self, key: str) -> "HFConfig":
        """The object under `key` (such as `text_config`), read in the same way."""
        return HFConfig(self.require(key, dict), self.origin, f"{self._prefix}{key}.")

    def _checked(self, key: str, value: object, kind: type[T], minimum: int) -> T:
        wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            raise self._error(key, f"is {_shown(value)}, where {_KINDS[kind]} is expected")
        if kind is int and isinstance(value, int) and value < minimum:
            raise self._error(key, f"is {_shown(value)}, where an integer of at least {minimum} is expected")
        checked: Any = float(value) if kind is float and isinstance(value, int) else value
        return checked  # type: ignore[no-any-return]  # mypy cannot see that `kind` was checked above

    def _error(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.origin}: key '{self._prefix}{key}' {problem}")


def parse_config(data: bytes, origin: str) -> HFConfig:
    """The configuration in the bytes of the JSON file `origin`. Nothing in it is ever executed.

    A `ModelError` names the file that is not JSON (with the position of the fault) or holds no object.
    """
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as err:
        where = f"line {err.lineno}, column {err.colno}"
        raise ModelError(f"{origin}: not valid JSON: {err.msg} at {where}") from err
    except (ValueError, RecursionError) as err:  # bytes that are no UTF-8, absurd numbers or nesting
        raise ModelError(f"{origin}: not readable as JSON: {err}") from err
    if not isinstance(values, dict):
        raise ModelError(f"{origin}: holds {_shown(values)}, where an object of keys is expected")
    return HFConfig(values, origin)


def _shown(value: object) -> str:
    text = json.dumps(value) if not isinstance(value, dict | list) else f"a JSON {type(value).__name__}"
    text = text.replace("JSON dict", "JSON object")
    return text if len(text) <= 40 else f"{text[:37]}..."
