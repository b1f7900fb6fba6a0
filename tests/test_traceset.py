"""Trace sets: the same inputs give the same bytes; groups, peers, placements, manifests; outside readers agree."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stage
from stage.errors import TraceError
from stage.synthesis import job
from stage.trace.groups import PIPELINE_ENDS, GroupTable
from stage.trace.node import NodeType
from stage.trace.verify import verify
from stage.traceset import TraceSet
from tests.small import request


def traces(model: str = "llama3-8b", strategy: str = "megatron_sp", **options: Any) -> TraceSet:
    return TraceSet.of(job(request(model, strategy, **options)))


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        traces(pp=2, dp=2, tp=2, batch=8).write(tmp_path / name)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("a", "b"))
    assert [f.name for f in first] == [f.name for f in second]
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in second]


def test_another_process_gives_the_same_bytes() -> None:
    """Hashes of texts are seeded anew in every process; nothing may depend on them."""
    program = (
        "import hashlib; from tests.test_traceset import traces;"
        "t = traces('mixtral-8x7b', 'megatron_moe', pp=2, dp=2, tp=2, ep=2, batch=8);"
        "print(hashlib.sha256(b''.join(t.rank(r) for r in t.ranks)).hexdigest(), hashlib.sha256(repr(t.groups).encode()).hexdigest())"
    )
    found = set()
    for seed in ("1", "2"):
        environment = {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path]),
        }
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
        )
        found.add(run.stdout)
    assert len(found) == 1


def test_ranks_are_made_alone_and_in_any_order() -> None:
    every = [traces(pp=2, dp=2, tp=2).rank(rank) for rank in range(8)]
    other = traces(pp=2, dp=2, tp=2)
    assert [other.rank(rank) for rank in reversed(range(8))] == every[::-1]


def test_a_rank_that_is_not_there_is_refused() -> None:
    for rank in (-1, 8):
        with pytest.raises(TraceError, match=f"rank {rank} is not one of the 8 ranks"):
            traces(pp=2, dp=2, tp=2).rank(rank)


def test_group_numbers_are_compact_and_the_formula_is_the_table() -> None:
    for options in (
        {"pp": 2, "dp": 2, "tp": 2},
        {"pp": 4, "dp": 2, "cp": 2},
        {"dp": 2, "cp": 2, "tp": 2, "ep": 4},
    ):
        model = "mixtral-8x7b" if "ep" in options else "gpt3-125m"
        made = traces(model, "megatron_moe", sizes={"layers": 4}, **options)
        groups = made.classes.groups
        assert list(made.groups) == [str(i + 1) for i in range(len(made.groups))]
        assert groups.count == len(made.groups)
        for axes in groups.axes:
            for rank in made.ranks:
                if axes == PIPELINE_ENDS and made.classes.of(rank) not in (0, options["pp"] - 1):
                    continue
                (number,) = groups.numbers(axes, np.array([made.classes.position(rank)])).tolist()
                assert rank in made.groups[str(number)], (axes, rank)
        used = {
            str(n.get("pg_name"))
            for rank in made.ranks
            for n in made.nodes(rank)
            if n.type == NodeType.COMM_COLL
        }
        assert used <= set(made.groups), (
            "a stage that does not communicate over some axes has groups of them too"
        )
        assert all(len(ranks) > 1 and len(set(ranks)) == len(ranks) for ranks in made.groups.values())


def test_groups_of_a_placement_are_those_of_the_positions() -> None:
    placement = np.array([5, 3, 0, 7, 1, 6, 2, 4])
    mesh = request("llama3-8b", "megatron", pp=2, dp=2, tp=2).mesh
    plain, moved = (
        GroupTable(mesh, [("tp",), ("dp", "tp")]),
        GroupTable(mesh, [("tp",), ("dp", "tp")], placement),
    )
    assert moved.table() == {
        name: [int(placement[rank]) for rank in ranks] for name, ranks in plain.table().items()
    }


def test_a_placement_moves_ranks_and_changes_nothing_else() -> None:
    placement = (5, 3, 0, 7, 1, 6, 2, 4)
    plain, moved = traces(pp=2, dp=2, tp=2, batch=4), traces(pp=2, dp=2, tp=2, batch=4, placement=placement)
    assert verify(moved).ok
    for position, rank in enumerate(placement):
        for a, b in zip(plain.nodes(position), moved.nodes(rank), strict=True):
            assert (a.id, a.name, a.data_deps, a.get("pg_name")) == (
                b.id,
                b.name,
                b.data_deps,
                b.get("pg_name"),
            )
            for end in ("comm_src", "comm_dst"):
                if a.get(end) is not None:
                    assert placement[int(str(a.get(end)))] == b.get(end)


def test_peers_are_the_neighbouring_stages() -> None:
    made = traces(pp=4, tp=2, batch=4, sizes={"layers": 4})
    for rank in made.ranks:
        for node in made.nodes(rank):
            ends = node.get("comm_src"), node.get("comm_dst")
            if node.type == NodeType.COMM_SEND:
                assert ends[0] == rank
                assert abs(int(str(ends[1])) - rank) == 2
            if node.type == NodeType.COMM_RECV:
                assert ends[1] == rank
                assert abs(int(str(ends[0])) - rank) == 2


def test_two_steps_are_one_twice() -> None:
    one, two = traces("llama3-8b", "ddp", dp=2, batch=4), traces("llama3-8b", "ddp", dp=2, batch=4, steps=2)
    assert verify(two).ok
    first, both = list(one.nodes(0)), list(two.nodes(0))
    assert len(both) == 2 * len(first)
    for i, node in enumerate(both):
        assert node.name == f"{first[i % len(first)].name}/step{i // len(first)}"
        assert node.get("step") == i // len(first)


def test_a_subset_of_ranks_is_written_as_it_is_in_the_whole(tmp_path: Path) -> None:
    made = traces(pp=2, dp=2, tp=2)
    counts = made.write(tmp_path / "some", ranks=[6, 1, 6])
    assert counts["ranks"] == 2
    assert counts["classes"] == 2
    assert sorted(p.name for p in (tmp_path / "some").glob("*.et")) == ["trace.1.et", "trace.6.et"]
    assert (tmp_path / "some" / "trace.6.et").read_bytes() == made.rank(6)
    report = verify(stage.TraceSet.open(tmp_path / "some"))
    assert report.ok
    assert report.unchecked


def test_the_manifest_says_what_was_made(tmp_path: Path) -> None:
    made = traces(pp=2, dp=2, tp=2, batch=8)
    made.write(tmp_path / "t")
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["batch"] == 8
    assert manifest["ranks"] == 8
    assert manifest["stage"] == stage.__version__
    assert [entry["ranks"] for entry in manifest["classes"]] == [4, 4]
    for entry in manifest["classes"]:
        image = made.classes.image(entry["class"]).data
        assert entry["sha256"] == hashlib.sha256(image.tobytes()).hexdigest()
        nodes = list(made.nodes(4 * entry["class"]))
        assert entry["nodes"] == len(nodes)
        assert entry["num_ops"] == sum(int(str(n.get("num_ops", 0))) for n in nodes)
        assert sum(c["count"] for c in entry["communication"]) == sum(n.type != NodeType.COMP for n in nodes)
        assert sum(c["bytes"] for c in entry["communication"]) == sum(
            int(str(n.get("comm_size", 0))) for n in nodes
        )


def test_totals_count_what_the_model_is_credited_with() -> None:
    from stage.counting import count_flops

    asked = request("llama3-8b", "megatron_sp", pp=2, dp=2, tp=2, batch=8)
    made = TraceSet.of(job(asked))
    total = sum(entry["model_flops"] * entry["ranks"] for entry in made.manifest["classes"])
    assert total == count_flops(asked.model, asked.batch, asked.seq).total


OUTSIDE = [
    ("llama3-8b", "megatron_sp", {"pp": 2, "tp": 2}),
    ("mixtral-8x7b", "megatron", {"dp": 2, "tp": 2, "ep": 4}),
]


@pytest.fixture(scope="module", params=OUTSIDE, ids=[case[0] for case in OUTSIDE])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, strategy, options = request.param
    path = tmp_path_factory.mktemp("outside") / "t"
    traces(model, strategy, **options).write(path)
    return path


def test_the_public_parser_reads_every_node(written: Path) -> None:
    protolib = pytest.importorskip("chakra.src.third_party.utils.protolib")
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    with (written / "trace.3.et").open("rb") as file:
        metadata = schema.GlobalMetadata()
        assert protolib.decodeMessage(file, metadata)
        assert metadata.version == "1.0.0"
        for ours in stage.TraceSet.open(written).nodes(3):
            theirs = schema.Node()
            assert protolib.decodeMessage(file, theirs)
            assert (theirs.id, theirs.name, theirs.type) == (ours.id, ours.name, ours.type)
            assert tuple(theirs.data_deps) == ours.data_deps
            found = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value"))) for a in theirs.attr}
            assert found == {key: (a.member, a.value) for key, a in ours.attrs.items()}
        assert not protolib.decodeMessage(file, schema.Node())


@pytest.mark.parametrize("tool", ["chakra_jsonizer", "chakra_visualizer"])
def test_the_public_tools_run_on_the_output(written: Path, tool: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name(tool)
    if not program.exists():
        pytest.skip("mlc-chakra is not installed")
    out = tmp_path / ("x.json" if tool == "chakra_jsonizer" else "x.graphml")
    arguments = ["--input_filename", str(written / "trace.0.et"), "--output_filename", str(out)]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    count = sum(1 for _ in stage.TraceSet.open(written).nodes(0))
    assert out.read_text().count("<node " if tool == "chakra_visualizer" else '"type": "COM') == count


def test_open_reads_what_write_wrote(tmp_path: Path) -> None:
    made = traces("mixtral-8x7b", "megatron_moe", dp=2, tp=2, ep=2)
    made.write(tmp_path / "t")
    back = stage.TraceSet.open(tmp_path / "t")
    assert back.groups == made.groups
    assert [back.rank(rank) for rank in back.ranks] == [made.rank(rank) for rank in made.ranks]
    shutil.rmtree(tmp_path / "t")


def test_one_rank_of_a_very_large_job_is_made_alone() -> None:
    made = stage.synthesize("llama3-70b", gpus=131072, tp=8, pp=16, seq=8192)
    assert made.world == 131072
    assert sum(1 for _ in made.nodes(131071)) == made.manifest["classes"][15]["nodes"]
