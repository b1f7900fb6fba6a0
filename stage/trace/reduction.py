"""The reduction of a bucket of gradients: an all-reduce, or with a sharded optimizer a reduce-scatter.

Buckets of one size are instances of one template, so their number does not matter; names have three digits, or as many
as the bucket's own number.
"""

from stage.trace.buckets import Bucket
from stage.trace.plan import StepPlan
from stage.trace.template import Ref, Template, TemplateNode

__all__ = ["bucket_digits", "bucket_key", "bucket_kind", "reduction_template"]


def bucket_kind(bucket: Bucket) -> str:
    """What a bucket is called, in `bucket000` or `expert_bucket001`: dense buckets count first."""
    return "expert_bucket" if bucket.expert else "bucket"


def bucket_digits(index: int) -> int:
    """How many digits the number of a bucket has."""
    return len(f"{index:03d}")


def bucket_key(index: int, bucket: Bucket, what: str) -> tuple[object, ...]:
    """What a template of a bucket depends on; `what` it does for the bucket."""
    kind = bucket.elements, bucket.shard, bucket.replicate, bucket.expert, bucket.dtype
    return what, *kind, bucket_digits(index)


def reduction_template(index: int, bucket: Bucket, step: StepPlan, phase: str) -> Template:
    """The collectives of one bucket, after the port `grad`; what shards first, then what replicates (HSDP)."""
    nodes: list[TemplateNode] = []
    after: tuple[Ref, ...] = (Ref("port", "grad"),)
    if bucket.shard:
        nodes.append(
            step.collective("reduce_scatter", "reduce_scatter", bucket.elements, bucket.shard, after, phase)
        )
        after = (Ref("self", 0),)
    if bucket.replicate:
        elements = bucket.owned(step.mesh)
        nodes.append(step.collective("all_reduce", "all_reduce", elements, bucket.replicate, after, phase))
    numbers = ("bucket", "micro_batch") if step.per_micro_batch else ("bucket",)
    marks = step.pipeline.marks if phase == "backward" else ()
    return Template(
        bucket_kind(bucket), phase, step.chain(nodes), numbers=(*numbers, *marks), digits=bucket_digits(index)
    )
