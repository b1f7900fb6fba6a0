"""How long synthesis takes: `python -m benchmarks.speed`.

Symbolic work must not depend on the number of ranks, and one rank of a large job must come alone, without the
others. Both show in the table: the second column is flat, and so is the third.
"""

import time

import stage

__all__ = ["main"]

TP, PP = 8, 16
WORLDS = (128, 1024, 16_384, 131_072)


def main() -> None:
    """Print a row of seconds for each size of the job."""
    print(f"llama3.1-405b, tp {TP}, pp {PP}, one microbatch of 8192 tokens a rank and stage")
    print(f"{'ranks':>8} {'synthesize':>12} {'last rank':>12} {'its bytes':>12}")
    for world in WORLDS:
        started = time.perf_counter()
        traces = stage.synthesize(
            "llama3.1-405b",
            gpus=world,
            tp=TP,
            pp=PP,
            batch=PP * world // (TP * PP),
            seq=8192,
            stage_layers=[7, *[8] * 14, 7],
        )
        synthesized = time.perf_counter()
        image = traces.rank(world - 1)
        assert image
        done = time.perf_counter()
        print(f"{world:8,} {synthesized - started:10.2f} s {done - synthesized:10.4f} s {len(image):12,}")


if __name__ == "__main__":
    main()
