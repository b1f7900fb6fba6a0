"""How an option or a strategy says the load of the experts: `balanced`, `zipf:1.1`, or the name of a file."""

import re
from typing import Final

from stage.errors import StrategyError

__all__ = ["BALANCED", "check_expert_load", "zipf_exponent"]

BALANCED: Final = "balanced"
LARGEST_EXPONENT: Final = 100
_FORM: Final = "give balanced, zipf:EXPONENT as in zipf:1.1, or a .csv or .json file"


def check_expert_load(value: object, where: str) -> str:
    """A load as an option or a strategy says it; a `StrategyError` names what is none.

    >>> check_expert_load("zipf:1.1", "expert_load")
    'zipf:1.1'
    """
    if not isinstance(value, str) or not (
        value == BALANCED or value.endswith((".csv", ".json")) or zipf_exponent(value) is not None
    ):
        raise StrategyError(f"{where} is {value!r}; {_FORM}")
    return value


def zipf_exponent(text: str) -> float | None:
    """The exponent in `zipf:1.1`, None for a text that is none.

    >>> zipf_exponent("zipf:1.1"), zipf_exponent("zipf:-1"), zipf_exponent("load.csv")
    (1.1, None, None)
    """
    match = re.fullmatch(r"zipf:([0-9]{1,3}(?:\.[0-9]{1,9})?)", text)
    exponent = float(match[1]) if match else -1.0
    return exponent if 0 <= exponent <= LARGEST_EXPONENT else None
