"""Depth by how drafts fared, or how sure the drafter is; the load does not count."""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from specbench.depth.controller import Admission, Bounded
from specbench.method import Budget, Row, Verdict


class Heuristic(Bounded):
    """Two levels more for a row whose drafts were all accepted, one less for another, as
    transformers' ``heuristic`` schedule.

    Args:
        depth, max_nodes: the most.
        first: levels of a row's first draft.
    """

    def __init__(self, depth: int, max_nodes: int, *, first: int = 5) -> None:
        super().__init__(depth, max_nodes)
        if first < 1:
            raise ValueError(f"first {first} is out of range; valid: 1 or more")
        self.first = first
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """Each row's own."""
        return [self.within(self.depths.get(row, self.first)) for row in rows]

    def observe(self, verdict: Verdict) -> None:
        """Counts for each row that drafted something."""
        for row in verdict.rows:
            step, depth = row.steps[-1], self.depths.get(row, self.first)
            if step.depth:
                depth = depth + 2 if step.matched == step.depth else max(1, depth - 1)
                self.depths[row] = min(depth, max(1, self.budget.depth))

    def reset(self) -> None:
        """Forgets all rows."""
        self.depths: WeakKeyDictionary[Row, int] = WeakKeyDictionary()


class Confidence(Bounded):
    """Verifies a row's draft up to the first token that was drawn while the drafter was not sure,
    that one included, as transformers' ``assistant_confidence_threshold``.

    There it is the drawn token's own probability that counts, here the likeliest token's. Drafters
    without chances are always sure.

    Args:
        depth, max_nodes: the most.
        threshold: the least chance to be sure.
        adaptive: fit the threshold to what was accepted: of all seen so far, the one with the least
            share of unsure accepted tokens, three times, plus share of sure refused ones.
    """

    reads_drafts = True
    needs_chances = True

    def __init__(
        self, depth: int, max_nodes: int, *, threshold: float = 0.4, adaptive: bool = False
    ) -> None:
        super().__init__(depth, max_nodes)
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold {threshold} is out of range; valid: 0..1")
        self.first, self.threshold, self.adaptive = threshold, threshold, adaptive
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The most for all."""
        return [self.budget] * len(rows)

    def admit(self, admission: Admission) -> None:
        """Up to the first node behind an unsure one."""
        for row in range(len(admission.num_nodes)):
            sure = [True]
            while (found := admission.next(row)) and sure[found.parent]:
                sure.append(found.chance is None or found.chance >= self.threshold)
                admission.admit(row)

    def observe(self, verdict: Verdict) -> None:
        """Remembers the tokens of chains that were put to the test."""
        if not self.adaptive or verdict.proposal.chances is None:
            return
        for row, chances in zip(verdict.rows, verdict.proposal.chances, strict=True):
            step = row.steps[-1]
            if step.nodes == step.depth:
                tested = chances[: step.matched + 1]
                self.seen += [(chance, i < step.matched) for i, chance in enumerate(tested)]
        if len(self.seen) > 5:
            self.threshold = best_threshold(self.seen, self.threshold)

    def reset(self) -> None:
        """Begins again with the first threshold."""
        self.threshold = self.first
        self.seen: list[tuple[float, bool]] = []


def best_threshold(seen: Sequence[tuple[float, bool]], otherwise: float) -> float:
    """The threshold of least cost, 1 false alarm to 3 misses, each as a share; of equals the
    highest.

    Args:
        seen: chances, and whether the token was accepted.
        otherwise: where all or none were accepted.
    """
    taken = [chance for chance, accepted in seen if accepted]
    refused = [chance for chance, accepted in seen if not accepted]
    if not taken or not refused:
        return otherwise

    def cost(threshold: float) -> float:
        misses = sum(chance < threshold for chance in taken) / len(taken)
        alarms = sum(chance >= threshold for chance in refused) / len(refused)
        return alarms + 3 * misses

    return min(sorted({chance for chance, _ in seen}, reverse=True), key=cost)


class Ema(Bounded):
    """One of a few depths for all rows, by a moving average of accepted tokens for batches of about
    the same size, as SGLang's adaptive steps.

    Args:
        depth, max_nodes: the most; deeper tiers do not count.
        tiers: the depths.
        weight: of the newest step in the average.
        warm_up: steps before the first change.
        interval: steps between two.
        up, down: what is added to the average before it is rounded, to see whether it is time for
            the next tier, or for the one before.
    """

    def __init__(
        self,
        depth: int,
        max_nodes: int,
        *,
        tiers: Sequence[int] = (1, 3, 7),
        weight: float = 0.2,
        warm_up: int = 10,
        interval: int = 5,
        up: float = 0.0,
        down: float = 0.25,
    ) -> None:
        super().__init__(depth, max_nodes)
        if not tiers or min(tiers) < 1 or not 0 < weight <= 1 or interval < 1 or warm_up < 0:
            raise ValueError(
                f"tiers {tuple(tiers)}, weight {weight}, interval {interval}, warm_up {warm_up} "
                "are out of range; valid: depths of 1 or more, 0..1, 1 or more, 0 or more"
            )
        if not (math.isfinite(up) and math.isfinite(down)):
            raise ValueError(f"up {up}, down {down} are out of range; valid: numbers")
        self.tiers = sorted({min(tier, depth) for tier in tiers})
        self.weight, self.warm_up, self.interval = weight, warm_up, interval
        self.up, self.down = up, down
        self.reset()

    def choose(self, rows: Sequence[Row]) -> list[Budget]:
        """The tier of the batch's size."""
        return [self.within(self.tiers[self._average(len(rows)).tier])] * len(rows)

    def observe(self, verdict: Verdict) -> None:
        """Moves the average and, at times, the tier."""
        steps = [row.steps[-1] for row in verdict.rows]
        offered = [step.matched for step in steps if step.depth]
        if not offered:
            return
        average = self._average(len(steps))
        average.add(sum(offered) / len(offered), self.weight)
        since = average.num_steps - self.warm_up
        if since >= 0 and since % self.interval == 0:
            average.tier = self._moved(average)

    def _moved(self, average: "_Average") -> int:
        tier, accepted = average.tier, average.accepted
        if tier + 1 < len(self.tiers) and round(accepted + self.up) + 1 > self.tiers[tier]:
            return tier + 1
        if tier and round(accepted + self.down) + 1 <= self.tiers[tier - 1]:
            return tier - 1
        return tier

    def _average(self, batch: int) -> "_Average":
        """Of batches up to the same power of two."""
        return self.averages.setdefault(math.ceil(math.log2(batch)), _Average(len(self.tiers) // 2))

    def reset(self) -> None:
        """Begins again with the middle tier."""
        self.averages: dict[int, _Average] = {}


class _Average:
    """A moving average, and the tier that it led to."""

    def __init__(self, tier: int) -> None:
        self.tier, self.num_steps, self.accepted = tier, 0, 0.0

    def add(self, accepted: float, weight: float) -> None:
        self.accepted += (weight if self.num_steps else 1.0) * (accepted - self.accepted)
        self.num_steps += 1
