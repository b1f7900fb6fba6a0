"""Predicted memory of published runs; rows are carried here with their sources, the whole tables are not needed."""

from pathlib import Path

import pytest

from stage.errors import StageError
from stage.published import megatron_ci, simumax_b200
from stage.published.memory_accuracy import BOUNDS, MEMORY_SETS, memory_accuracy
from stage.published.row import read_rows

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", MEMORY_SETS)
def test_every_row_is_within_the_bound_of_its_set(name: str) -> None:
    found = memory_accuracy(name, read_rows(DATA / f"{name}.csv"))
    wrong = {row.case: round(row.error, 4) for row in found.rows if abs(row.error) > BOUNDS[name]}
    assert not wrong
    assert len(found.rows) >= 12
    assert found.summary["median"] <= found.summary["worst"] <= BOUNDS[name]


def test_rows_that_are_left_out_are_counted() -> None:
    name = "megatron_ci_golden_iter_time_memory"
    rows = read_rows(DATA / f"{name}.csv")
    found = memory_accuracy(name, rows)
    assert sum(found.left_out.values()) + len(found.rows) == len(rows)
    assert found.left_out == {
        "a number of GPUs that is in no column": 1,
        "a change of the program that is in no column": 1,
        "a model outside the zoo": 1,
    }


def test_a_row_that_is_no_job_is_left_out_with_what_is_said_of_it() -> None:
    row = dict(read_rows(DATA / "simumax_b200_real_vs_perf.csv")[0], layer_num="7")
    found = memory_accuracy("simumax_b200_real_vs_perf", [row])
    assert not found.rows
    (why,) = found.left_out
    assert why.startswith("no job of this tool: 7 layers of llama3-70b do not divide by pp = 2")


def test_a_row_says_the_job() -> None:
    rows = {row["case"]: row for row in read_rows(DATA / "simumax_b200_real_vs_perf.csv")}
    job = simumax_b200.row_request(rows["llama3_70b_l12_tp2_cp4_pp1_dp1_seq131072_mbc4_cef"])
    assert (job.degrees["tp"], job.degrees["cp"], job.degrees["dp"]) == (2, 4, 1)
    assert (job.seq, job.micro_batches, len(job.model.layers)) == (131072, 4, 12)
    tests = {row["case"]: row for row in read_rows(DATA / "megatron_ci_golden_iter_time_memory.csv")}
    job = megatron_ci.row_request(tests["gpt3_mcore_te_tp1_pp4_vp1"])
    assert (job.degrees["pp"], job.pipeline.chunks, job.strategy.schedule) == (4, 3, "interleaved")


def test_no_rows_have_no_summary() -> None:
    assert memory_accuracy("simumax_b200_real_vs_perf", []).summary == {}


def test_a_set_without_memory_is_refused() -> None:
    with pytest.raises(StageError, match="set 'mlperf' has no memory; choose one of simumax"):
        memory_accuracy("mlperf", [])


def test_a_table_without_a_column_is_refused() -> None:
    with pytest.raises(StageError, match="column 'status' is missing"):
        memory_accuracy("simumax_b200_real_vs_perf", [{"case": "x", "model": "llama3-70b"}])


def test_a_cell_that_is_no_number_is_refused() -> None:
    row = dict(read_rows(DATA / "simumax_b200_real_vs_perf.csv")[0], layer_num="many")
    with pytest.raises(StageError, match="column 'layer_num' is 'many'"):
        simumax_b200.row_request(row)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="give a CSV file that can be read"):
        read_rows(tmp_path / "none.csv")
