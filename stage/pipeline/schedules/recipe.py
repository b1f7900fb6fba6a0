"""Orders written as a recipe: which actions come next, each taking its own next micro-batch."""

from collections import Counter

from stage.pipeline.schedule import Action

__all__ = ["Recipe"]


class Recipe:
    """Turns steps such as `0F 1I 1W` (chunk and kind) into actions, counting micro-batches for each of them."""

    def __init__(self) -> None:
        self.done: Counter[tuple[int, str]] = Counter()

    def run(self, steps: str, times: int = 1) -> list[Action]:
        """The actions of some steps, several times over.

        >>> " ".join(map(str, Recipe().run("0F 1F 0I", 2)))
        '0F0 1F0 0I0 0F1 1F1 0I1'
        """
        return [self._next(int(step[0]), step[1]) for _ in range(times) for step in steps.split()]

    def _next(self, chunk: int, kind: str) -> Action:
        """One action; `B` and `I` are counted together, since either is the backward of a micro-batch."""
        key = (chunk, "B" if kind == "I" else kind)
        action = Action(kind, chunk, self.done[key])
        self.done[key] += 1
        return action
