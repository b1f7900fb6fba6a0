"""Proof of a set of traces by its rank classes, in time and memory that do not grow with the ranks.

Two ranks of a class differ in the names of their groups and the ranks of their peers only. That this is so, and that
both are formulas of the rank's place, is proved first (`verify_symmetry`, `verify_patches`), and that a class sees one
class at each place: groups that are the same collective of its ranks have members of the same classes, and peers that
are the same message of its ranks are of one class. So the first rank of each class stands for all of it:

* rules that a rank keeps alone, every rank of the class keeps;
* members of a group that are of one class run the same collectives by construction, and those of different classes do
  if the first ranks of these do;
* the peers of a class are all ranks of one class, so a send of the class and the receive that is its inverse are one
  message for each of its ranks, and all pair up if those of first ranks do (`verify_partners`);
* a run of all ranks under the rules of `verify_run` is deterministic, and what a rank waits for depends on the states
  of its members and peers alone: so at every step all ranks of a class are in the same state. A collective is thus
  issued by all members of one class at once, and is complete when the first rank of each class among its members has
  issued it: a run of the first ranks alone, with those of a group that take part, takes the same steps as the run of
  all, and blocks if and only if that does.
"""

from dataclasses import replace

from stage.errors import TraceError
from stage.trace.classes import RankClasses
from stage.trace.limits import exceeded, needed
from stage.trace.report import Defect, Findings, Report, plural
from stage.trace.verify import compare_ranks
from stage.trace.verify_groups import Groups
from stage.trace.verify_partners import Links
from stage.trace.verify_patches import ClassPatches, tables_fit
from stage.trace.verify_rank import RankReader
from stage.trace.verify_record import TAG, RankRecord
from stage.trace.verify_splits import check_splits, members_by_class
from stage.trace.verify_symmetry import FormulaMembers, check_formulas, check_partition, warn_alike

__all__ = ["verify_classes"]


def verify_classes(classes: RankClasses) -> Report:
    """Return everything that is wrong with the traces of all ranks, each defect with the first rank that has it."""
    findings = Findings()
    unchecked: list[str] = []
    if not check_partition(classes, findings):
        unchecked.append("traces: not read, since the ranks of a class do not stand alike on the mesh")
        return findings.report(unchecked, 0, 0)
    numbers = check_formulas(classes, findings)
    world = classes.mesh.world
    known = Groups(world, FormulaMembers(classes.groups), known=True)
    reader = RankReader(world, known, findings)
    links = Links(classes, findings)
    records: dict[int, RankRecord] = {}
    for number in range(classes.count):
        rank = classes.first(number)
        if not tables_fit(classes, number):
            text = "the places of its own groups and peers are not places of its trace: make the set again"
            findings.add(rank, None, "patch", text)
            continue
        data = bytes(classes.rank(rank))
        try:
            records[rank] = reader.read(rank, data)
        except TraceError as err:
            findings.add(rank, None, "file", str(err))
            continue
        patches = ClassPatches(classes, number, records[rank], data, numbers, findings)
        patches.check()
        records[rank] = links.between_classes(number, records[rank], patches.peers())
    compare_ranks(records, known, findings, unchecked)
    check_splits(members_by_class(records, classes, numbers), list(reader.splits), findings)
    tags = [int(record.columns[TAG].max(initial=0)) for record in records.values()]
    limits = exceeded(world, classes.groups.count, max(tags, default=0))
    for rule, text in (*limits, *needed(world)):
        findings.warn(None, None, rule, text)
    warn_alike(numbers, findings)
    nodes = classes.ranks_per_class * sum(len(record.structure.ids) for record in records.values())
    return spread(findings.report(unchecked, world, nodes), classes)


def spread(report: Report, classes: RankClasses) -> Report:
    """Return the report with the number of ranks that each defect of a class stands for."""
    if classes.ranks_per_class == 1:
        return report
    text = f" (as on all {plural(classes.ranks_per_class, 'rank')} of its class)"

    def whole(found: Defect) -> Defect:
        return found if found.rank is None else replace(found, message=found.message + text)

    return replace(
        report, defects=tuple(map(whole, report.defects)), warnings=tuple(map(whole, report.warnings))
    )
