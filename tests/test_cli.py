"""The command line itself: what it passes on, what it prints, and its exit status.

The library functions are recorded here, not run: `test_cli_end_to_end.py` runs them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest

import stage
from stage.cli import main
from stage.errors import StageError

Capture = pytest.CaptureFixture[str]


@dataclass
class Recorder:
    """Stands in for `stage.synthesize` and for the TraceSet that it returns."""

    calls: list[tuple[tuple[object, ...], dict[str, object]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __call__(self, *args: object, **options: object) -> "Recorder":
        self.calls.append((args, options))
        return self

    def write(self, path: str, **options: object) -> dict[str, object]:
        self.calls.append(((path,), options))
        return {"ranks": 8, "classes": 2, "nodes": 1234, "bytes": 5_000_000}

    def write_bundle(self, path: str, **options: object) -> dict[str, object]:
        return {**self.write(path, **options), "bundle_bytes": 777}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(vars(stage), "synthesize", made)
    return made


def raising(error: BaseException) -> Callable[..., object]:
    def call(*_args: object, **_options: object) -> object:
        raise error

    return call


def test_synth_passes_every_option_on(recorder: Recorder, tmp_path: Path) -> None:
    placement = tmp_path / "placement"
    placement.write_text("1 0")
    line = (
        "synth llama3-8b --strategy fsdp --gpus 8 --dp 2 --tp 2 --pp 2 --cp 1 --ep 2 --etp 1 --vpp 2 --dp-shard 2 --tp-x 2 "
        "--batch 16 --micro-batch 2 --seq 128 --schedule gpipe --zero 1 --recompute full "
        "--context-balance none --stage-layers 3,2x2 "
        "--grad-reduce microbatch --dtype fp16 --grad-dtype bf16 --fp8 mxfp8 --no-fp8-param-gather "
        "--fp8-dispatch --no-clip --vocab-multiple 64 --dropout --steps 2 "
        "--reshard-after-forward 2 --prefetch 2 --no-overlap-grad --param-dtype fp8 "
        "--set layers=4,heads=2 --set d_ff=8 --ranks 0-1,7 --attention unfused --mask full --mtp --bucket-size 9 --context ring "
        "--overlap-chunks 4 --moe-shared-expert-overlap --streams per-axis "
        f"--out {tmp_path / 't'} --force --json --placement {placement} --resume --jobs 3 --dask tcp://host:8786 "
        "--expert-load zipf:1.1 --seed 3 --capacity-factor 1.25 --pad-to-capacity --alltoall p2p"
    )
    assert main(line.split()) == 0
    (model, options), (where, writing) = recorder.calls
    assert model == ("llama3-8b",)
    assert options == {
        "strategy": "fsdp",
        "gpus": 8,
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "cp": 1,
        "ep": 2,
        "etp": 1,
        "vpp": 2,
        "dp_shard": 2,
        "tp_x": 2,
        "context": "ring",
        "batch": 16,
        "micro_batch": 2,
        "seq": 128,
        "schedule": "gpipe",
        "zero": 1,
        "recompute": "full",
        "expert_load": "zipf:1.1",
        "seed": 3,
        "capacity_factor": 1.25,
        "pad_to_capacity": True,
        "alltoall": "p2p",
        "context_balance": "none",
        "stage_layers": [3, 2, 2],
        "reshard_after_forward": 2,
        "prefetch": 2,
        "grad_reduce": "microbatch",
        "overlap_grad": False,
        "dtype": "fp16",
        "grad_dtype": "bf16",
        "fp8": "mxfp8",
        "fp8_param_gather": False,
        "fp8_dispatch": True,
        "param_dtype": "fp8",
        "clip": False,
        "vocab_multiple": 64,
        "dropout": True,
        "steps": 2,
        "sizes": {"layers": 4, "heads": 2, "d_ff": 8},
        "attention": "unfused",
        "mask": "full",
        "mtp": True,
        "bucket_size": 9,
        "tp_overlap_chunks": 4,
        "moe_shared_expert_overlap": True,
        "streams": "per-axis",
        "placement": [1, 0],
    }
    assert where == (str(tmp_path / "t"),)
    assert writing == {
        "ranks": [0, 1, 7],
        "force": True,
        "resume": True,
        "jobs": 3,
        "dask": "tcp://host:8786",
        "progress": None,
    }


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), "exists already"),
        (("--format", "bundle"), "is no bundle"),
        (("--format", "bundle", "--out", "s3://bucket/job.stage"), "a bundle is one local file"),
    ],
)
def test_a_place_that_can_not_be_written_is_refused_before_any_work(
    recorder: Recorder, tmp_path: Path, capsys: Capture, more: tuple[str, ...], text: str
) -> None:
    assert main(["synth", "llama3-8b", "--out", str(tmp_path), *more]) == 2
    assert text in capsys.readouterr().err
    assert recorder.calls == []


def test_synth_leaves_what_is_not_given_to_the_strategy(recorder: Recorder, tmp_path: Path) -> None:
    assert main(["synth", "m", "--out", str(tmp_path / "t")]) == 0
    (model, options), (_, writing) = recorder.calls
    assert model == ("m",)
    given = {key: value for key, value in options.items() if value is not None}
    assert given == {
        **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "micro_batch", "steps"), 1),
        "dtype": "bf16",
        "grad_dtype": "fp32",
        "clip": True,
        "dropout": False,
        "sizes": {},
        "attention": "fused",
        "mask": "causal",
        "mtp": False,
    }
    unasked = dict.fromkeys(("ranks", "dask", "progress"))
    assert writing == {**unasked, "force": False, "resume": False, "jobs": 1}


@pytest.mark.usefixtures("recorder")
def test_synth_prints_a_summary_in_both_forms(capsys: Capture) -> None:
    assert main(["synth", "m", "--out", "t"]) == 0
    shown = capsys.readouterr().out
    assert "nodes    1,234" in shown
    assert "bytes    5,000,000 (4.768 MiB)" in shown
    assert main(["synth", "m", "--out", "t", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["out", "ranks", "classes", "nodes", "bytes", "seconds", "warnings"]
    assert (report["ranks"], report["bytes"]) == (8, 5_000_000)


def test_synth_says_in_one_line_what_no_consumer_takes(recorder: Recorder, capsys: Capture) -> None:
    recorder.warnings = ["many groups", "long tags"]
    assert main(["synth", "m", "--out", "t"]) == 0
    assert capsys.readouterr().err == "stage: warning: many groups; long tags\n"
    assert main(["synth", "m", "--out", "t", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["warnings"] == recorder.warnings
    assert captured.err == ""


def test_synth_writes_a_bundle_where_it_is_asked_to(recorder: Recorder, capsys: Capture) -> None:
    assert main(["synth", "m", "--format", "bundle", "--out", "t.stage", "--force", "--json"]) == 0
    assert recorder.calls[-1] == (("t.stage",), {"force": True, "progress": None})
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        "out",
        "ranks",
        "classes",
        "nodes",
        "bytes",
        "bundle_bytes",
        "seconds",
        "warnings",
    ]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (StageError("found,\nwhere; what to do"), 2, "stage: error: found, where; what to do\n"),
        (
            OSError(28, "No space left on device", "t/trace.0.et"),
            2,
            "stage: error: t/trace.0.et: No space left on device; check the path, its permissions and the space on its disk\n",
        ),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, status: int, text: str
) -> None:
    monkeypatch.setitem(vars(stage), "synthesize", raising(error))
    assert main(["synth", "m", "--out", "t"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bogus", "No such command 'bogus'; see `stage --help`"),
        ("synth", "Missing argument 'MODEL'; see `stage synth --help`"),
        ("synth m", "Missing option '--out'; see `stage synth --help`"),
        (
            "synth m --out t --gpus x",
            "Invalid value for '--gpus': Input should be a valid integer, unable to parse string as an integer "
            "(found 'x'); see `stage synth --help`",
        ),
        (
            "synth m --out t --mask half",
            "Invalid value for '--mask': 'half' is not one of 'causal', 'full' (found 'half'); see `stage synth --help`",
        ),
        (
            "synth m --out t --tp 0",
            "Invalid value for '--tp': Input should be greater than or equal to 1 (found '0'); see `stage synth --help`",
        ),
        (
            "synth m --out t --format bundle --ranks 0",
            "--ranks: a bundle holds all ranks; leave it out, and choose them with stage unpack",
        ),
        ("unpack t.stage --out t", "t.stage: there is no such file; give a bundle"),
        ("unpack . --out t", ".: is a folder, and its traces are files already; give a bundle"),
        (
            "show . --rank 0",
            ".: holds no traces, so it has no rank 0; --rank is for trace sets",
        ),
        (
            "synth m --out t --stage-layers 7y",
            "--stage-layers '7y': '7y' is not LAYERS or LAYERSxSTAGES; write the layers of each stage in order, "
            "as in 7,8x14,7",
        ),
    ],
)
@pytest.mark.usefixtures("recorder")
def test_misuse_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"stage: error: {message}\n")
    assert list(tmp_path.iterdir()) == []


SHOWN = """\
model           toy
parameters      8,030,261,248 (8.030 G)
forward flops   12 FLOP
backward flops  24 FLOP
batch           4
seq             8
mask            full

sizes
layers=2 tied=1 pattern=1,0

blocks, one of each kind
kind   count  parameters
layer      2         100

CLOSED FORMS of mine: what each device does for one micro-batch,
`batch` being its sequences over all devices. An axis of degree 1 is left out.

values are at
tp=2 batch=1 seq=8 vocab=16

parameters on a device
block  count  parameters  value
layer      2  d_ff        2
all        1  3 d_ff      6

saved for backward, of one micro-batch
block  count  bytes        value
layer      2  4 batch seq  1.000 MiB

matrix multiplications
block  phase    flops        value
layer  forward  2 batch seq  4.000 TFLOP

communication of activations
block  phase    sends                 bytes                    value
layer  forward  2 all_gather over tp  2 batch seq^2 / (cp dp)  2.000 MiB

communication of parameters and gradients
block  what       per   sends                 bytes                    value
layer  gradients  step  2 all_gather over tp  2 batch seq^2 / (cp dp)  2.000 MiB

message to the next pipeline stage
bytes       value
batch / tp  2 B

layer forward, op by op
op  flops             bytes
up  2 batch seq / tp  batch

layer backward, op by op
op          flops             bytes
up (again)  2 batch seq / tp  batch
"""


def test_show_prints_what_the_library_reports(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[tuple[object, dict[str, object]]] = []
    sent = {
        "kind": "all_gather",
        "axes": "tp",
        "count": 2,
        "bytes": "2*batch*seq**2/(cp*dp)",
        "bytes_value": 2**21,
    }
    op = {"name": "up", "phase": "forward", "flops": "2*batch*seq/tp", "bytes": "batch"}
    again = {"name": "up", "phase": "recompute", "flops": "2*batch*seq/tp", "bytes": "batch"}
    forms = {
        "strategy": "mine",
        "degrees": {"tp": 2},
        "parts": {},
        "batch": 1,
        "seq": 8,
        "vocab": 16,
        "parameters": "3*d_ff",
        "parameters_value": 6,
        "flops": [{"block": "layer", "phase": "forward", "flops": "2*batch*seq", "flops_value": 4 * 10**12}],
        "communication": [{"block": "layer", "phase": "forward", **sent}],
        "message": {"bytes": "batch/tp", "bytes_value": 2},
        "blocks": [
            {
                "kind": "layer",
                "count": 2,
                "parameters": "d_ff",
                "parameters_value": 2,
                "forward": {"ops": [op]},
                "backward": {"ops": [again]},
                "saved": {"bytes": "4*batch*seq", "bytes_value": 2**20},
                "data_parallel": [{"tensors": "gradients", "per": "step", **sent}],
            }
        ],
    }
    report = {
        "name": "toy",
        "parameters": 8_030_261_248,
        "flops": {"forward": 12, "backward": 24},
        "batch": 4,
        "seq": 8,
        "mask": "full",
        "sizes": {"layers": 2, "tied": True, "pattern": [1, 0]},
        "blocks": [{"kind": "layer", "count": 2, "parameters": 100}],
        "closed_forms": forms,
    }

    def model_summary(model: str, **options: object) -> dict[str, object]:
        asked.append((model, options))
        return report

    stand_in(monkeypatch, "stage.summary", model_summary=model_summary, trace_summary=None)
    line = "show toy --strategy megatron --batch 4 --seq 8 --mask full --set a=1 --json"
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert asked == [
        (
            "toy",
            {
                "strategy": "megatron",
                "batch": 4,
                "seq": 8,
                "mask": "full",
                "attention": "fused",
                "mtp": False,
                "sizes": {"a": 1},
            },
        )
    ]
    assert main(["show", "toy"]) == 0
    assert capsys.readouterr().out == SHOWN


def test_show_of_a_folder_of_traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "trace.0.et").write_bytes(b"")

    def trace_summary(path: Path, rank: int | None = None) -> dict[str, object]:
        return {"path": str(path), "rank": rank}

    stand_in(monkeypatch, "stage.summary", model_summary=None, trace_summary=trace_summary)
    assert main(["show", str(tmp_path), "--rank", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path), "rank": 3}
    assert main(["show", str(tmp_path), "--seq", "3"]) == 2
    assert (
        "is a trace set; --strategy, --batch, --seq, --set and degrees are for models"
        in capsys.readouterr().err
    )


@dataclass(frozen=True)
class Defect:
    rank: int | None
    node: int | None
    rule: str
    message: str


@dataclass(frozen=True)
class Report:
    defects: tuple[Defect, ...]
    unchecked: tuple[str, ...] = ()
    warnings: tuple[Defect, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.defects


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    for key, member in members.items():
        setattr(module, key, member)
    monkeypatch.setitem(sys.modules, name, module)


def test_verify_exits_1_on_defects(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    defect = Defect(0, 7, "dependency", "node 7 waits for node 9, which is not in the file")
    warning = Defect(None, None, "descriptors", "many files")
    report = Report((defect,), ("ranks 1 to 3",), (warning, replace(warning, rank=2)))
    stand_in(monkeypatch, "stage.verification", verify_path=lambda *_, **__: report)
    assert main(["verify", "t", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "defects": [{"rank": 0, "node": 7, "rule": "dependency", "message": defect.message}],
        "warnings": [
            {"rank": None, "node": None, "rule": "descriptors", "message": "many files"},
            {"rank": 2, "node": None, "rule": "descriptors", "message": "many files"},
        ],
        "unchecked": ["ranks 1 to 3"],
    }
    assert main(["verify", "t"]) == 1
    assert capsys.readouterr().out == (
        "rank  node  rule        message\n"
        f"   0     7  dependency  {defect.message}\n"
        "warning: many files\n"
        "warning: rank 2: many files\n"
        "not checked: ranks 1 to 3\n"
        "t: 1 defect\n"
    )


def test_verify_exits_0_without_defects(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[tuple[str, bool]] = []

    def verify_path(path: str, *, exhaustive: bool) -> Report:
        asked.append((path, exhaustive))
        return Report(())

    stand_in(monkeypatch, "stage.verification", verify_path=verify_path)
    assert main(["verify", "t"]) == 0
    assert capsys.readouterr().out == "t: no defect\n"
    assert main(["verify", "t", "--exhaustive"]) == 0
    assert asked == [("t", False), ("t", True)]


def test_export_lists_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    def export_astra_sim(path: Path, out: Path, system: str, *, force: bool, progress: object) -> list[str]:
        assert progress is None
        assert not force
        out.mkdir()
        (out / "run.sh").write_text(f"{path} {system}")
        return ["it may hang"]

    stand_in(monkeypatch, "stage.io.astra_sim", export_astra_sim=export_astra_sim)
    out = tmp_path / "kit"
    line = ["export", "t", "--to", "astra-sim", "--system", "h100", "--out", str(out)]
    assert main([*line, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"out": str(out), "files": ["run.sh"]}
    assert printed.err == "stage: warning: it may hang\n"
    assert (out / "run.sh").read_text() == "t h100"


@pytest.mark.parametrize("command", ["models", "strategies", "systems"])
def test_listings_fit_80_columns_and_agree_with_json(command: str, capsys: Capture) -> None:
    assert main([command, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)[command]
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 and "\x1b" not in line for line in lines)
    for item in listed:
        assert any(line.startswith(item["name"]) for line in lines)


def test_systems_prints_the_file_of_one(capsys: Capture, tmp_path: Path) -> None:
    assert main(["systems", "h100"]) == 0
    text = capsys.readouterr().out
    shipped = (Path(stage.__file__).parent / "cost" / "systems" / "h100.toml").read_text(encoding="utf-8")
    assert text == shipped
    assert "whitepaper" in text
    # What is printed is a file that can be changed and named.
    mine = tmp_path / "mine.toml"
    mine.write_text(text.replace("bandwidth_gb_s = 450", "bandwidth_gb_s = 300"), encoding="utf-8")
    assert main(["systems", str(mine), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["network"][0]["bandwidth_gb_s"]) == ("mine", 300)
    assert found["matrix_tflops"]["bf16"] == pytest.approx(989.4)


def test_systems_refuses_what_it_does_not_know(capsys: Capture) -> None:
    assert main(["systems", "h1000"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("stage: error: there is no system 'h1000': take one of a100-40gb-pcie, ")
    assert shown.count("\n") == 1


COMMANDS = ["synth", "unpack", "verify", "show", "models", "strategies", "systems", "export"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: stage {command}" in shown
    assert command in {"models", "strategies"} or f"  stage {command} " in shown


def test_bare_command_prints_help_and_version_is_known(capsys: Capture) -> None:
    assert main([]) == 0
    assert "Usage: stage [OPTIONS] COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stage {stage.__version__}\n"
