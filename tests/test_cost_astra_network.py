"""The simple network against what ASTRA-sim's analytical backend (congestion unaware) printed for one node alone."""

import pytest

from stage.cost.astra_network import AstraNetwork
from stage.cost.work import Exchange, Kernel
from stage.errors import StageError

# Kind, members, NPUs, comm_size, and the cycles (ns) of the last rank: topology Switch, 50 GB/s, 500 ns, rings,
# preferred-dataset-splits 4, endpoint-delay 10, local-mem-bw 3000, active-chunks-per-dimension 1.
RECORDED = [
    ("all_reduce", 2, 2, 64, 8120),
    ("all_reduce", 2, 2, 1001, 10170),
    ("all_reduce", 2, 2, 16777220, 329004),
    ("all_reduce", 8, 8, 64, 56600),
    ("all_reduce", 8, 8, 1001, 70750),
    ("all_reduce", 8, 8, 16777220, 618056),
    ("all_reduce", 4, 8, 1048576, 54316),
    ("all_gather", 2, 2, 64, 4080),
    ("all_gather", 2, 2, 1001, 5120),
    ("all_gather", 2, 2, 16777220, 316580),
    ("all_gather", 8, 8, 64, 28320),
    ("all_gather", 8, 8, 1001, 35540),
    ("all_gather", 8, 8, 16777220, 2215820),
    ("all_gather", 4, 8, 1048576, 70744),
    ("reduce_scatter", 2, 2, 64, 4080),
    ("reduce_scatter", 2, 2, 1001, 5110),
    ("reduce_scatter", 2, 2, 16777220, 168716),
    ("reduce_scatter", 8, 8, 64, 28320),
    ("reduce_scatter", 8, 8, 1001, 35400),
    ("reduce_scatter", 8, 8, 16777220, 316356),
    ("reduce_scatter", 4, 8, 1048576, 27556),
    ("all_to_all", 2, 2, 64, 4080),
    ("all_to_all", 2, 2, 1001, 5110),
    ("all_to_all", 2, 2, 16777220, 160328),
    ("all_to_all", 8, 8, 64, 113160),
    ("all_to_all", 8, 8, 1001, 141450),
    ("all_to_all", 8, 8, 16777220, 1206840),
    ("all_to_all", 4, 8, 1048576, 53560),
    ("send", 2, 2, 1, 1000),
    ("send", 2, 2, 1000, 1018),
    ("send", 2, 2, 1048576, 20531),
    ("send", 2, 2, 268435456, 5001000),
]


@pytest.mark.parametrize(("kind", "members", "world", "size", "cycles"), RECORDED)
def test_simulator_is_met_to_the_nanosecond(
    kind: str, members: int, world: int, size: int, cycles: int
) -> None:
    seconds = AstraNetwork(world).exchanges([Exchange(kind, size, (members,))])
    assert round(1e9 * float(seconds[0]), 3) == cycles


def test_kernels_run_at_the_roofline() -> None:
    """9e9 FLOPs at 900 TFLOP/s, 3e9 bytes at 3 TB/s, and what the simulator cannot time."""
    work = [Kernel("matmul", "bf16", 9_000_000_000, 1), Kernel("add", "bf16", 10**6, 3 * 10**9)]
    assert AstraNetwork(2).kernels([*work, Kernel("copy", "bf16", 0, 8)]).tolist() == [1e-5, 1e-3, 0.0]


def test_one_member_takes_no_time() -> None:
    assert AstraNetwork(4).exchanges([Exchange("all_reduce", 8, (1, 1))]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        (
            Exchange("broadcast", 8, (2,)),
            "ASTRA-sim does not simulate 'broadcast': it has all_reduce, all_gather, reduce_scatter, all_to_all, "
            "permute, send, recv",
        ),
        (
            Exchange("all_gather", 3, (2,)),
            "ASTRA-sim cannot cut an all_gather of 3 bytes in 4: gather at least that",
        ),
    ],
)
def test_what_it_cannot_do_is_an_error(exchange: Exchange, text: str) -> None:
    with pytest.raises(StageError) as err:
        AstraNetwork(2).exchanges([exchange])
    assert str(err.value) == text
