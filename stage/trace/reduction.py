"""The reduction of a bucket of gradients: an all-reduce, or with a sharded optimizer a reduce-scatter."""

from stage.trace.buckets import Bucket
from stage.trace.plan import StepPlan
from stage.trace.template import Ref, Template, TemplateNode, chain

__all__ = ["bucket_name", "reduction_template"]


def bucket_name(index: int, bucket: Bucket) -> str:
    """`bucket000`, `expert_bucket001`: dense buckets count first."""
    return f"{'expert_' if bucket.expert else ''}bucket{index:03d}"


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
    numbers = ("micro_batch",) if step.per_micro_batch else ()
    return Template(bucket_name(index, bucket), phase, chain(nodes), numbers=numbers)
