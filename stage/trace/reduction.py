"""The reduction of a bucket of gradients: an all-reduce, or with a sharded optimizer a reduce-scatter.

Buckets of one size are instances of one template, so their number does not matter; names have three digits, or as many
as the bucket's own number.
"""

from stage.trace.buckets import Bucket
from stage.trace.plan import StepPlan
from stage.trace.template import Ref, Template, TemplateNode, chain

__all__ = ["bucket_name", "reduction_key", "reduction_template"]


def bucket_name(index: int, bucket: Bucket) -> str:
    """`bucket000`, `expert_bucket001`: dense buckets count first."""
    return f"{_kind(bucket)}{index:03d}"


def reduction_key(index: int, bucket: Bucket, step: StepPlan, phase: str) -> tuple[object, ...]:
    """What the template of a bucket depends on."""
    owned = bucket.owned(step.mesh)
    return bucket.elements, owned, bucket.shard, bucket.replicate, bucket.expert, _digits(index), phase


def _kind(bucket: Bucket) -> str:
    return "expert_bucket" if bucket.expert else "bucket"


def _digits(index: int) -> int:
    return len(f"{index:03d}")


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
    return Template(_kind(bucket), phase, chain(nodes), numbers=("bucket",), digits=_digits(index))
