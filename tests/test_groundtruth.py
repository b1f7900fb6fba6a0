"""Records of real training code against synthesized traces: what is identical, what is explained, what is detected."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.groundtruth import main
from benchmarks.records.formats import compare_file

RECORDS = Path(__file__).parent / "data" / "groundtruth"
SHARED = Path(__file__).parents[2] / "shared" / "reference" / "groundtruth"

IDENTICAL = ("identical", ())
SKIPPED = ("skipped", ())

MEGATRON: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp2": IDENTICAL,
    "tp4": IDENTICAL,
    "tp2_recompute_full": IDENTICAL,
    "tp2_sp": IDENTICAL,
    "tp2_sp_recompute_full": IDENTICAL,
    "tp2_sp_tied": IDENTICAL,
    "dp4": IDENTICAL,
    "dp4_overlapgrad_bucket20k": IDENTICAL,
    "dp4_distopt": IDENTICAL,
    "dp4_bf16reduce_distopt": IDENTICAL,
    "dp4_distopt_overlap_bucket20k": ("explained", ("parameter-gather-in-forward",)),
    "ep2_dp2": IDENTICAL,
    "ep2_dp2_shared": IDENTICAL,
    "ep2_dp2_allgather": ("explained", ("allgather-dispatcher",)),
    "ep2_dp2_auxloss": ("explained", ("loads-not-balanced",)),
    "ep2_dp4_distopt": ("explained", ("chained-optimizers-gather-twice",)),
    "ep2_tp2_sp": IDENTICAL,
    "ep2_tp2_sp_auxloss": ("explained", ("loads-counted-for-auxiliary-loss", "loads-not-balanced")),
    "pp2_m4": IDENTICAL,
    "pp4_m8": IDENTICAL,
    "pp2_tp2_sp_dp2_m4_distopt": IDENTICAL,
    "pp2_vpp2_m4": SKIPPED,
    "pp2_vpp2_m4_nooverlap_batch": SKIPPED,
    "cp2_stubattn": ("explained", ("attention-stubbed",)),
}

MORE: dict[str, tuple[str, tuple[str, ...]]] = {
    "more_ag_etp2": ("explained", ("allgather-dispatcher",)),
    "more_aux_recompute": ("explained", ("loads-counted-for-auxiliary-loss", "loads-not-balanced")),
    "more_aux_seq": ("explained", ("loads-counted-for-auxiliary-loss", "loads-not-balanced")),
    "more_big": ("explained", ("bucket-reduced-inside-block",)),
    "more_cp2_dp2_tp2": ("explained", ("attention-stubbed",)),
    "more_dist_odd": IDENTICAL,
    "more_dp2_ep2_dist_ovl": ("explained", ("parameter-gather-in-forward", "bucket-reduced-inside-block")),
    "more_dp4_fp32": IDENTICAL,
    "more_dp8_dist_bf16_ovl": ("explained", ("parameter-gather-in-forward",)),
    "more_ep2_dp4_ovl_nodist": ("explained", ("bucket-reduced-inside-block",)),
    "more_ep2_tp2_allgather": ("explained", ("allgather-dispatcher",)),
    "more_ep2_tp2_sp_shared": ("explained", ("chained-optimizers-gather-twice",)),
    "more_ep_etp2_tp2": ("explained", ("exchanged-before-gathered",)),
    "more_etp2_recompute": ("explained", ("exchanged-before-gathered",)),
    "more_moe_dist_odd": ("explained", ("chained-optimizers-gather-twice",)),
    "more_moe_ep1_dp2": IDENTICAL,
    "more_moe_ep1_tp2": IDENTICAL,
    "more_moe_pp2_ep2_dp2": IDENTICAL,
    "more_moe_pp2_tp2_dp2_dist_ovl": (
        "explained",
        ("parameter-gather-in-forward", "bucket-reduced-inside-block"),
    ),
    "more_moe_recompute": IDENTICAL,
    "more_moe_sel": IDENTICAL,
    "more_pp2_dp2_align": ("explained", ("parameter-gather-in-forward", "aligned-gradient-reduction")),
    "more_pp2_dp2_dist_fin": ("explained", ("bucket-reduced-inside-block",)),
    "more_pp2_dp2_ovl_bucket": IDENTICAL,
    "more_pp2_dp2_ovl_bucket_dist_par": ("explained", ("parameter-gather-in-forward",)),
    "more_pp2_tied_ptl_dp2": ("explained", ("tokens-counted-for-loss",)),
    "more_pp2_tp2_rec": IDENTICAL,
    "more_pp4_m2": IDENTICAL,
    "more_pp4_tied_tp2": IDENTICAL,
    "more_ptl_cp2": ("explained", ("tokens-counted-for-loss", "attention-stubbed")),
    "more_tied_dp2_dist": IDENTICAL,
    "more_tied_dp2_tp1": IDENTICAL,
    "more_tp2_dp2_ovl_bucket": ("explained", ("bucket-reduced-inside-block",)),
    "more_tp2_dp2_ovlpar_bucket": (
        "explained",
        ("parameter-gather-in-forward", "bucket-reduced-inside-block"),
    ),
    "more_tp2_dp2_pp2_ovl": IDENTICAL,
    "more_tp2_recfull_dp2_ovl": ("explained", ("bucket-reduced-inside-block",)),
    "more_tp2_sp_sel": IDENTICAL,
    "more_tp4_ep4_dp2_dist": ("explained", ("chained-optimizers-gather-twice",)),
    "more_tp8_kv4": ("explained", ("kv-heads-gathered",)),
    "more_tp8sp_kv4": ("explained", ("kv-heads-gathered",)),
}

CLIP, APART = "norm-summed-by-tensor", "input-gradients-apart"
LOGITS, TARGET = "logits-gathered", "target-logit-in-compute-dtype"
BY_USE, BY_BLOCK = "norm-gradients-summed-by-use", "norm-gradients-summed-by-block"
UNSUMMED, ON_DEMAND, EARLY = (
    "norm-gradients-not-summed",
    "recomputed-on-demand",
    "recomputation-stopped-early",
)

RUNS: dict[str, list[tuple[str, ...]]] = {
    "dtensor_tp_llama": [
        (CLIP, LOGITS, APART),
        (CLIP, TARGET, APART),
        (CLIP, TARGET),
        (CLIP, LOGITS, BY_USE),
        (CLIP, TARGET, BY_USE),
        (CLIP, TARGET, BY_USE),
        (CLIP, TARGET, APART),
    ],
    "fsdp2_llama": [*[(CLIP,)] * 10, (CLIP, BY_BLOCK), (APART,), ("root-is-one-unit", CLIP)],
    "activation_checkpoint": [
        (),
        (EARLY,),
        (),
        (UNSUMMED, ON_DEMAND, EARLY),
        (UNSUMMED, ON_DEMAND),
        (BY_BLOCK, ON_DEMAND, EARLY),
    ],
}


def stored(name: str) -> list[Path]:
    """A record in this repository, and where the uncompressed originals are at hand also that."""
    originals = [SHARED / f"{name}.json", SHARED / "megatron_core" / f"{name}.json"]
    return [RECORDS / f"{name}.json.gz", *(path for path in originals if path.exists())]


@pytest.mark.parametrize("name", MEGATRON | MORE)
def test_megatron_core(name: str) -> None:
    for path in stored(name):
        (verdict,) = compare_file(path)
        assert (verdict.status, tuple(verdict.explained)) == (MEGATRON | MORE)[name], "\n".join(
            verdict.lines()
        )


@pytest.mark.parametrize("name", RUNS)
def test_dtensor_fsdp2_and_checkpointing(name: str) -> None:
    for path in stored(name):
        verdicts = list(compare_file(path))
        assert [tuple(verdict.explained) for verdict in verdicts] == RUNS[name]
        assert not [line for verdict in verdicts for line in verdict.unexplained]


def test_pipelines_as_executed() -> None:
    for path in stored("pp_runtime_torch"):
        verdicts = list(compare_file(path))
        assert [verdict.status for verdict in verdicts] == ["identical"] * 5 + ["skipped"] * 8
        assert [verdict.events for verdict in verdicts[:5]] == [32, 160, 32, 160, 80]


def test_pipelines_as_planned() -> None:
    for path in stored("pp_schedules_torch"):
        verdicts = list(compare_file(path))
        gpipe = [verdict for verdict in verdicts if verdict.case.startswith("ScheduleGPipe")]
        assert [verdict.status for verdict in gpipe] == ["identical"] * 8  # order and messages of four tables
        table = [verdict for verdict in verdicts if verdict.case.startswith("Schedule1F1B")]
        assert [tuple(verdict.explained) for verdict in table] == [("last-rank-off-by-one",)] * 5
        others = [verdict for verdict in verdicts if verdict not in gpipe + table]
        assert [verdict.status for verdict in others] == ["skipped"] * 23
        assert "is not a schedule of this version" in others[0].skipped


def records_here() -> list[Path]:
    return sorted(SHARED.rglob("*.json")) if SHARED.exists() else sorted(RECORDS.glob("*.json.gz"))


def test_all_records_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path) for path in records_here()]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert " 0 unexplained" in last


def changed(name: str, change: Callable[[list[dict[str, Any]]], None], folder: Path) -> str:
    """A copy of a Megatron-core record whose first rank's ops were changed."""
    data = json.loads(gzip.decompress((RECORDS / f"{name}.json.gz").read_bytes()))
    change(next(iter(data["ranks"].values()))["ops"])
    path = folder / "changed.json"
    path.write_text(json.dumps(data))
    return str(path)


def moved(ops: list[dict[str, Any]], op: str, index: int = 0) -> int:
    """The position of one of the collectives of a kind that move something."""
    found = [
        i for i, o in enumerate(ops) if str(o.get("op", "")).startswith(op) and o.get("group_size", 2) > 1
    ]
    return found[index]


def drop(op: str, index: int = 0) -> Callable[[list[dict[str, Any]]], None]:
    def change(ops: list[dict[str, Any]]) -> None:
        del ops[moved(ops, op, index)]

    return change


def alter(op: str, index: int = 0, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda ops: ops[moved(ops, op, index)].update(fields)


def swap(first: str, second: str, index: int = 0) -> Callable[[list[dict[str, Any]]], None]:
    def change(ops: list[dict[str, Any]]) -> None:
        i, j = moved(ops, first, index), moved(ops, second, index)
        ops[i], ops[j] = ops[j], ops[i]

    return change


CHANGES = {
    "a dropped all-reduce": ("tp2", drop("all_reduce")),
    "a dropped all-gather": ("tp2_sp", drop("all_gather", 5)),
    "a dropped message": ("pp2_m4", drop("recv", 2)),
    "a dropped parameter gather, where others are explained": (
        "dp4_distopt_overlap_bucket20k",
        drop("all_gather", 1),
    ),
    "a dropped second gather of chained optimizers": ("ep2_dp4_distopt", drop("all_gather_coalesced", 3)),
    "a changed size": ("tp2", alter("all_reduce", 3, bytes=6146)),
    "a changed size of a bucket": ("dp4_distopt", alter("reduce_scatter", bytes=395520)),
    "a changed size of a message": ("pp4_m8", alter("send", bytes=3072)),
    "a changed size of an uneven exchange": ("ep2_dp2_auxloss", alter("all_to_all", 2, bytes=10180)),
    "an exchange that does not fit its dispatch": (
        "ep2_dp2_auxloss",
        alter("all_to_all", 2, in_splits=[54, 52]),
    ),
    "a changed dtype": ("dp4_bf16reduce_distopt", alter("reduce_scatter", dtype="float32")),
    "a swapped order": ("tp2_sp", swap("reduce_scatter", "all_gather")),
    "a swapped order of gathers in forward": (
        "dp4_distopt_overlap_bucket20k",
        lambda ops: ops.insert(1, ops.pop(2)),
    ),
    "a backward before its time": ("pp2_m4", lambda ops: ops.insert(0, ops.pop(5))),
    "a wrong group": ("tp2", alter("all_reduce", group=[0, 2])),
    "a wrong group of experts": ("ep2_dp4_distopt", alter("reduce_scatter", 1, group=[0, 1])),
    "a wrong peer": ("pp4_m8", alter("send", peer=2)),
    "a wrong phase": ("tp2_sp", alter("all_reduce", 3, phase="optimizer")),
    "one more collective": ("tp2", lambda ops: ops.append(dict(ops[1]))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_detects(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, change = CHANGES[what]
    assert main([changed(name, change, tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"{name}: UNEXPLAINED" in out
    assert "@@ record event" in out
    assert ", 1 unexplained" in out


def test_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([changed("tp2", drop("all_reduce", 9), tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "changed.json: tp2: UNEXPLAINED (23 events on 1 rank)"
    assert "  + forward   all_reduce [0 1] 256 bytes fp32  (head.loss.max.all_reduce/forward/mb0)" in lines


MISUSE = {
    "no such file": (None, "can not be read: No such file or directory"),
    "no JSON": ("{", "not valid JSON"),
    "no object": ("[]", "holds a list, where a record is an object"),
    "another format": ('{"a": 1}', "not a record of a known format"),
    "no dims": ('{"config": {}, "ranks": {}}', "the configuration lacks tp, pp, dp"),
    "no ops": (
        '{"runs": [{"schedule": "ScheduleGPipe"}], "dims": {}}',
        "not a well-formed record: KeyError: 'virtual'",
    ),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_one_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = MISUSE[what]
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {path}: {message}")


def test_a_job_that_stage_refuses_is_not_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(gzip.decompress((RECORDS / "tp2.json.gz").read_bytes()))
    data["config"]["ffn"] = 81
    (tmp_path / "odd.json").write_text(json.dumps(data))
    assert main([str(tmp_path / "odd.json")]) == 1
    assert "Stage refuses this job: d_ff = 81" in capsys.readouterr().out
