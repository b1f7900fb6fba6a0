"""Fields of fixed width refuse what they can not hold."""

import pytest

import stage
from stage.errors import TraceError
from stage.trace.capacity import check_capacity

FITS = {"ranks": 1 << 21, "layers": 1 << 14, "micro_batches": 1 << 8, "steps": 1 << 14, "chunks": 1 << 7}


def test_what_fits_exactly_is_taken() -> None:
    check_capacity(**FITS)


@pytest.mark.parametrize("name", ["ranks", "layers", "steps", "chunks"])
def test_one_more_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=rf"= {FITS[name] + 1} is more than the {FITS[name]} that a trace"):
        check_capacity(**{**FITS, name: FITS[name] + 1})


def test_tags_are_positive_int32() -> None:
    with pytest.raises(TraceError, match="2 x steps x micro_batches x vpp = "):
        check_capacity(**{**FITS, "micro_batches": (1 << 9) + 1})


def test_a_job_with_too_many_steps_is_refused() -> None:
    with pytest.raises(TraceError, match=r"^steps = 16385 is more than the 16384 "):
        stage.synthesize("llama3-8b", gpus=1, seq=8, steps=16385)
