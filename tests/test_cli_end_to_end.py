"""The commands with the whole library behind them: `main(argv)` to files, text and exit status."""

import json
from pathlib import Path

import pytest

from stage.cli import main

Capture = pytest.CaptureFixture[str]
TINY = "--set layers=4,d_model=64,d_ff=128,heads=4,kv_heads=2,head_dim=16,vocab=512 --seq 32"
JOB = f"llama3-8b {TINY} --gpus 8 --tp 2 --pp 2 --batch 8"


def synth(line: str, out: Path, *more: str) -> int:
    return main(["synth", *line.split(), "--out", str(out), *more])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_job_from_synthesis_to_summary(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "t"
    assert synth(JOB, out, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    traces = [out / f"trace.{rank}.et" for rank in range(8)]
    assert {path.name for path in out.iterdir()} == {path.name for path in traces} | {
        "groups.json",
        "manifest.json",
    }
    assert report["ranks"] == 8
    assert report["bytes"] == sum(path.stat().st_size for path in traces)
    assert report["nodes"] > 8 * report["classes"] > 0
    assert report["seconds"] > 0

    assert main(["verify", str(out), "--json"]) == 0
    sound = {"ok": True, "defects": [], "warnings": [], "unchecked": []}
    assert json.loads(capsys.readouterr().out) == sound
    assert main(["verify", str(out), "--exhaustive", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == sound
    assert main(["show", str(out)]) == 0
    assert main(["show", str(out), "--rank", "7", "--json"]) == 0
    capsys.readouterr()


def test_a_bundle_from_synthesis_to_summary(tmp_path: Path, capsys: Capture) -> None:
    direct, bundle, out = tmp_path / "t", tmp_path / "job.stage", tmp_path / "unpacked"
    assert synth(JOB, direct) == 0
    capsys.readouterr()
    assert synth(JOB, bundle, "--format", "bundle", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bundle_bytes"] == bundle.stat().st_size
    assert made.pop("warnings") == []
    assert main(["unpack", str(bundle), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {**report, "out": 0, "seconds": 0, "bundle_bytes": 0} == {
        **made,
        "out": 0,
        "seconds": 0,
        "bundle_bytes": 0,
    }
    assert content(out) == content(direct)

    assert main(["unpack", str(bundle), "--out", str(out), "--ranks", "0-1,6"]) == 2
    assert "force to replace" in capsys.readouterr().err
    assert main(["unpack", str(bundle), "--out", str(out), "--ranks", "0-1,6", "--force"]) == 0
    assert sorted(path.name for path in out.glob("*.et")) == ["trace.0.et", "trace.1.et", "trace.6.et"]
    capsys.readouterr()
    for option in ([], ["--exhaustive"]):
        assert main(["verify", str(bundle), "--json", *option]) == 0
        sound = {"ok": True, "defects": [], "warnings": [], "unchecked": []}
        assert json.loads(capsys.readouterr().out) == sound
    for more in ([], ["--rank", "7"]):
        shown = []
        for path in (direct, bundle):
            assert main(["show", str(path), *more]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1] != ""


def test_a_bundle_is_exported_with_its_traces(tmp_path: Path, capsys: Capture) -> None:
    bundle, kit = tmp_path / "job.stage", tmp_path / "kit"
    line = ["export", str(bundle), "--to", "astra-sim", "--system", "h100", "--out", str(kit)]
    assert synth(JOB, tmp_path / "t") == 0
    assert synth(JOB, bundle, "--format", "bundle") == 0
    assert main(line) == 0
    assert content(kit / "traces") == content(tmp_path / "t")
    assert "traces=traces/trace" in (kit / "run.sh").read_text()
    capsys.readouterr()
    assert main(line) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*line, "--force"]) == 0


def test_a_damaged_bundle_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    bundle = tmp_path / "job.stage"
    assert synth(JOB, bundle, "--format", "bundle") == 0
    whole = bundle.read_bytes()
    bundle.write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    for line in (["verify"], ["show"], ["unpack", "--out", str(tmp_path / "t")]):
        assert main([line[0], str(bundle), *line[1:]]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(
            f"stage: error: {bundle} is damaged: it has {len(whole) // 2} bytes, but should"
        )
        assert shown.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert synth(JOB, tmp_path / name) == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_an_existing_folder_is_replaced_only_by_force(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "t"
    assert synth(JOB, out) == 0
    before = content(out)
    assert synth(f"{JOB} --pp 1", out) == 2
    assert "--force" in capsys.readouterr().err
    assert content(out) == before
    assert synth("llama3-8b " + TINY + " --gpus 2 --tp 2 --batch 8", out, "--force") == 0
    assert len(list(out.glob("*.et"))) == 2


def test_some_ranks_are_written_and_verified_as_far_as_they_go(tmp_path: Path, capsys: Capture) -> None:
    whole, some = tmp_path / "whole", tmp_path / "some"
    assert synth(JOB, whole) == 0
    assert synth(JOB, some, "--ranks", "0-1,6") == 0
    written = sorted(path.name for path in some.glob("*.et"))
    assert written == ["trace.0.et", "trace.1.et", "trace.6.et"]
    assert all((some / name).read_bytes() == (whole / name).read_bytes() for name in written)
    capsys.readouterr()
    assert main(["verify", str(some), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["unchecked"]


def test_verify_finds_what_was_broken(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "t"
    assert synth(JOB, out) == 0
    path = out / "trace.3.et"
    path.write_bytes(path.read_bytes()[:-5])
    capsys.readouterr()
    assert main(["verify", str(out), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert any(defect["rank"] == 3 for defect in report["defects"])
    assert all(list(defect) == ["rank", "node", "rule", "message"] for defect in report["defects"])


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_show_counts_a_model(model: str, capsys: Capture) -> None:
    assert main(["show", model, "--batch", "1", "--seq", "64", "--mask", "full", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] > 10**9
    assert report["flops"]["backward"] > report["flops"]["forward"] > 0
    assert main(["show", model]) == 0
    assert f"{report['parameters']:,}" in capsys.readouterr().out


def test_show_prints_closed_forms(capsys: Capture) -> None:
    assert main(["show", "llama3-8b", "--strategy", "megatron_sp", "--json"]) == 0
    forms = json.loads(capsys.readouterr().out)["closed_forms"]
    assert forms["flops"][1]["flops"].startswith("2*batch*seq*(")
    assert [entry for entry in forms["communication"] if entry["axes"] == "tp"]
    assert main(["show", "llama3-8b", "--dp", "2", "--tp", "4"]) == 0
    shown = capsys.readouterr().out
    assert "dp=2 tp=4 batch=2 seq=8192 vocab=128512" in shown
    assert max(map(len, shown.splitlines())) <= 80


WRONG = {
    "llama3-8b --gpus 8 --dp 3 --tp 2": ["8", "3"],
    f"llama3-8b {TINY} --gpus 12 --tp 3 --batch 12": ["heads", "4", "3"],
    "llama3-8b --set d_ff=14335 --gpus 4 --tp 4 --batch 4": ["d_ff", "14335", "4"],
    "mixtral-8x7b --gpus 3 --ep 3 --batch 3": ["experts", "8", "3"],
    "llama3-8b --set layers=5 --gpus 2 --pp 2 --batch 2": ["layers", "5", "2", "--stage-layers"],
    "llama3-8b --gpus 4 --batch 6": ["batch", "6", "4"],
    "llama3-8b --gpus 4 --batch 4 --seq 4098 --tp 4": ["seq", "4098", "4"],
    "llama3-8b --gpus 4 --pp 2 --batch 4 --stage-layers 16,15": ["16", "15", "32"],
    "lama3-8b --gpus 1 --batch 1": ["lama3-8b", "llama3-8b", "stage models"],
    "llama3-8b --strategy fsdpp --gpus 1 --batch 1": ["fsdpp", "fsdp"],
    "llama3-8b --set layer=3 --gpus 1 --batch 1": ["layer", "layers"],
    "llama3-8b --schedule zigzag --gpus 1 --batch 1": ["zigzag", "1f1b"],
    "llama3-8b --zero 4 --gpus 1 --batch 1": ["zero", "4"],
    "llama3-8b --dtype bf17 --gpus 1 --batch 1": ["bf17", "bf16"],
    "llama3-8b --strategy ddp --tp 2 --gpus 2 --batch 2": ["ddp", "tp", "2"],
    "llama3-8b --gpus 2 --batch 2 --ranks 0-2": ["2", "rank"],
    "no/such/config.json --gpus 1 --batch 1": ["no/such/config.json", "No such file"],
    "broken.json --gpus 1 --batch 1": ["broken.json", "line 1"],
    "short.json --gpus 1 --batch 1": ["short.json", "hidden_size"],
    "llama3-8b --strategy typo.toml --gpus 1 --batch 1": ["typo.toml", "shedule", "schedule"],
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line_that_names_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "short.json").write_text('{"model_type": "llama"}')
    (tmp_path / "typo.toml").write_text("shedule = '1f1b'\n[shard]\nbatch = ['dp']\n")
    before = sorted(tmp_path.iterdir())
    assert synth(line, tmp_path / "t") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("stage: error: ")
    assert [word for word in WRONG[line] if word not in captured.err] == [], captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_an_unwritable_place_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert synth(JOB, tmp_path / "file" / "t") == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert str(tmp_path / "file") in complaint


def test_a_folder_that_does_not_exist_cannot_be_verified(tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(tmp_path / "no")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert str(tmp_path / "no") in complaint
