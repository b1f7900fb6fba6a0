import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stage.cost.system_file import list_systems, load_system
from stage.errors import TraceError
from stage.io.astra_sim import SystemForExport, export_astra_sim, system_for_export
from stage.io.chakra import write_directory
from stage.trace import wire

KIT = ["groups.json", "memory.json", "network.yml", "run.sh", "system.json"]


def write_set(path: Path, world: int, groups: dict[str, list[int]] | None = None) -> None:
    trace = wire.frame(wire.encode_metadata("1.0.0"))
    write_directory(path, world, range(world), lambda _: trace, groups or {}, {})


def export(path: Path, world: int, *, name: str = "h100", groups: dict[str, list[int]] | None = None) -> Path:
    write_set(path / "set", world, groups)
    export_astra_sim(path / "set", path / "kit", system_for_export(load_system(name), world))
    return path / "kit"


def network(kit: Path) -> dict[str, list[str]]:
    lines = (line.split("#")[0].split(":") for line in (kit / "network.yml").read_text().splitlines()[1:])
    return {key: value.strip()[1:-1].split(", ") for key, value in lines}


def test_kit_is_written(tmp_path: Path) -> None:
    kit = export(tmp_path, 16, groups={"2": [8, 0], "1": [0, 1]})
    assert sorted(file.name for file in kit.iterdir()) == KIT
    assert json.loads((kit / "groups.json").read_text()) == {"1": [0, 1], "2": [8, 0]}
    assert json.loads((kit / "memory.json").read_text()) == {"memory-type": "NO_MEMORY_EXPANSION"}
    system = json.loads((kit / "system.json").read_text())
    assert (system["peak-perf"], system["local-mem-bw"], system["roofline-enabled"]) == (989.4, 3350.0, 1)
    assert system["all-to-all-implementation"] == ["ring", "ring"]


@pytest.mark.parametrize(
    ("world", "counts"), [(2, "2"), (4, "4"), (8, "8"), (16, "8 2"), (64, "8 8"), (12, "6 2"), (13, "13")]
)
def test_network_multiplies_to_the_world(tmp_path: Path, world: int, counts: str) -> None:
    found = network(export(tmp_path, world))
    assert " ".join(found["npus_count"]) == counts
    assert {len(values) for values in found.values()} == {len(counts.split())}


def test_units_are_those_of_the_simulator(tmp_path: Path) -> None:
    found = network(export(tmp_path, 16))
    assert [float(value) * 2**30 for value in found["bandwidth"]] == pytest.approx([450e9, 50e9], rel=1e-7)
    assert [float(value) for value in found["latency"]] == [600, 2700]


def test_torus_is_a_ring_for_each_dimension(tmp_path: Path) -> None:
    found = network(export(tmp_path, 128, name="tpu-v4"))
    assert found["topology"] == ["Ring", "Ring", "Ring"]
    assert found["npus_count"] == ["4", "4", "8"]
    # Two of six links lead along each dimension.
    assert [float(value) * 2**30 for value in found["bandwidth"]] == pytest.approx([100e9] * 3, rel=1e-7)


@pytest.mark.parametrize("name", list_systems())
def test_every_system_can_be_exported(name: str) -> None:
    for world in (2, 16, 96, 512, 1536):
        assert system_for_export(load_system(name), world).world == world


def test_kit_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    first = export(tmp_path, 16)
    before = {file: file.read_bytes() for file in first.iterdir()}
    export_astra_sim(tmp_path / "set", first, system_for_export(load_system("h100"), 16), force=True)
    assert {file: file.read_bytes() for file in first.iterdir()} == before


def finish(ranks: range, extra: str = "") -> str:
    lines = "\n".join(
        f"[workload] [info] sys[{rank}] finished, {100 + rank} cycles, exposed" for rank in ranks
    )
    return f"cat <<'END'\n{lines}\n{extra}\nEND"


def run(kit: Path, body: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the kit with a stand-in for the simulator that notes its arguments."""
    fake = kit.parent / "a simulator"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{kit.parent}/arguments"\n{body}\n')
    fake.chmod(0o755)
    values = {"PATH": os.environ["PATH"], "ASTRA_SIM": str(fake), **environment}
    return subprocess.run([str(kit / "run.sh")], env=values, capture_output=True, text=True, check=False)


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the run script is a bash script")


@needs_bash
def test_run_script_succeeds_when_every_rank_finished(tmp_path: Path) -> None:
    kit = export(tmp_path / "a folder", 4, groups={"1": [0, 1]})
    done = run(kit, finish(range(4)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "all 4 ranks finished after 103 ns\n", "")
    arguments = (kit.parent / "arguments").read_text().splitlines()
    assert arguments == [
        "--workload-configuration=../set/trace",
        "--system-configuration=system.json",
        "--network-configuration=network.yml",
        "--remote-memory-configuration=memory.json",
        "--comm-group-configuration=groups.json",
        "--logging-folder=log",
    ]


@needs_bash
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (finish(range(3)), "failed: 3 of 4 ranks finished, 0 critical messages, exit status 0"),
        (finish(range(4), "[system] [critical] oh"), "failed: 4 of 4 ranks finished, 1 critical messages"),
        (finish(range(3)) + "\nexit 3", "failed: 3 of 4 ranks finished, 0 critical messages, exit status 3"),
        ("exit 0", "failed: 0 of 4 ranks finished, 0 critical messages, exit status 0"),
        (finish(range(3)) + "\n" + finish(range(1)), "failed: 3 of 4 ranks finished"),
    ],
)
def test_run_script_fails_when_a_rank_did_not_finish(tmp_path: Path, body: str, text: str) -> None:
    done = run(export(tmp_path, 4), body)
    assert done.returncode == 1
    assert done.stderr.startswith(text)


@needs_bash
def test_run_script_tells_of_a_simulator_that_fails_after_all_ranks_finished(tmp_path: Path) -> None:
    done = run(export(tmp_path, 4), finish(range(4)) + "\nexit 3")
    assert done.returncode == 0
    assert done.stderr.startswith("note: the simulator ended with status 3 after its last rank had finished")


@needs_bash
def test_run_script_says_what_it_needs(tmp_path: Path) -> None:
    kit = export(tmp_path, 4)
    assert "--comm-group" not in (kit / "run.sh").read_text(), "there are no groups"
    assert run(kit, "", ASTRA_SIM="").stderr == "no simulator given: ./run.sh BINARY, or set ASTRA_SIM\n"
    assert run(kit, "", ASTRA_SIM="/nowhere/sim").stderr == "/nowhere/sim: no such program\n"
    (tmp_path / "set/trace.3.et").unlink()
    gone = run(kit, "")
    assert (gone.returncode, gone.stderr) == (2, "../set/trace.3.et: not there, or not writable\n")


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_set_that_the_simulator_cannot_run_is_an_error(tmp_path: Path) -> None:
    system = SystemForExport("mine", 1, 1, (("Ring", 4, 1, 1),))
    write_set(tmp_path / "one", 1)
    assert message(export_astra_sim, tmp_path / "one", tmp_path / "kit", system) == (
        f"{tmp_path / 'one'} is a job of one rank, but ASTRA-sim needs two or more: export another"
    )
    write_set(tmp_path / "two", 2)
    assert message(export_astra_sim, tmp_path / "two", tmp_path / "kit", system) == (
        f"system mine connects 4 ranks, but {tmp_path / 'two'} has 2: describe a network of that many"
    )
    write_set(tmp_path / "part", 4)
    (tmp_path / "part/trace.1.et").unlink()
    assert message(export_astra_sim, tmp_path / "part", tmp_path / "kit", system) == (
        f"{tmp_path / 'part'} has the traces of 3 of 4 ranks, but ASTRA-sim needs all: write the whole set"
    )
    assert not (tmp_path / "kit").exists()


def test_kit_never_lands_in_the_set_or_over_something_else(tmp_path: Path) -> None:
    system = SystemForExport("mine", 1, 1, (("Ring", 2, 1, 1),))
    write_set(tmp_path / "set", 2)
    assert "exists already" in message(export_astra_sim, tmp_path / "set", tmp_path / "set", system)
    assert "is the trace set itself" in message(
        export_astra_sim, tmp_path / "set", tmp_path / "set", system, force=True
    )
    (tmp_path / "file").write_text("mine")
    assert "exists already" in message(
        export_astra_sim, tmp_path / "set", tmp_path / "file", system, force=True
    )
    assert "cannot be written" in message(export_astra_sim, tmp_path / "set", tmp_path / "file/kit", system)


@pytest.mark.parametrize("dimension", [("Ring", 1, 1.0, 1.0), ("Torus", 4, 1.0, 1.0)])
def test_dimension_that_the_simulator_does_not_know_is_an_error(
    dimension: tuple[str, int, float, float],
) -> None:
    assert message(SystemForExport, "mine", 1, 1, (dimension,)) == (
        f"system mine: {dimension[0]} of {dimension[1]} is no dimension of a network: connect two or more by Ring, "
        "Switch, FullyConnected"
    )
