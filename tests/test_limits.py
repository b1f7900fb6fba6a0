"""Jobs keep within what consumers can take for as long as their size allows, and say where it does not."""

import dataclasses

import pytest

from stage.request import resolve_request
from stage.synthesis import job, synthesize
from stage.trace.job import Job
from stage.trace.limits import GROUP_OVERFLOW, TAG_LIMIT, exceeded, needed
from stage.trace.program import COLUMNS, Program
from stage.traceset import TraceSet

SIZES = {"layers": 4, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}


def test_each_limit_is_exceeded_by_the_first_number_beyond_it() -> None:
    assert exceeded(2, GROUP_OVERFLOW - 1, TAG_LIMIT - 1) == []
    assert exceeded(1, 0, 0) == [("one-rank", "the job has one rank, but ASTRA-sim needs two or more")]
    assert exceeded(2, GROUP_OVERFLOW, TAG_LIMIT) == [
        ("group-number", "group numbers up to 2148, but ASTRA-sim overflows from 2148 on"),
        ("comm-tag", "tags up to 500000000, but consumers take tags below 500000000"),
    ]
    assert needed(1024) == []
    assert [rule for rule, _ in needed(1025)] == ["descriptors"]


@pytest.mark.parametrize(("dp", "groups"), [(256, 1 + 2 * 256 + 4), (1024, 1 + 2 * 1024 + 4)])
def test_groups_are_numbered_compactly_so_that_large_jobs_fit(dp: int, groups: int) -> None:
    traces = synthesize("llama3-8b", sizes=SIZES, seq=32, dp=dp, tp=2, pp=2, batch=2 * dp)
    assert traces.classes.groups.count == groups
    assert traces.warnings == []
    assert list(traces.groups) == [str(number) for number in range(1, groups + 1)]


def test_a_job_of_more_groups_says_so() -> None:
    traces = synthesize("llama3-8b", sizes=SIZES, seq=32, dp=1200, tp=2, pp=2, batch=2400)
    assert traces.warnings == ["group numbers up to 2405, but ASTRA-sim overflows from 2148 on"]


def far(program: Program) -> Program:
    moved = [rows.copy() for rows in program.instances]
    for rows in moved:
        tags = rows[:, COLUMNS.index("tag")]
        tags[tags > 0] = TAG_LIMIT
    return dataclasses.replace(program, instances=tuple(moved))


def test_a_job_of_larger_tags_says_so() -> None:
    found: Job = job(resolve_request("llama3-8b", sizes=SIZES, seq=32, gpus=4, pp=2, batch=8))
    assert TraceSet.of(found).warnings == []
    traces = TraceSet.of(dataclasses.replace(found, programs=tuple(map(far, found.programs))))
    assert traces.warnings == ["tags up to 500000000, but consumers take tags below 500000000"]
