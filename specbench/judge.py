"""One method on one workload, held against a baseline: what was asked, and the verdicts.

The hard part is exact: losslessness, failures and, where the same code gives the same numbers,
outputs, target forwards, tau and acceptance. The soft part is equivalence within a margin, by
intervals: speed-ups, and tau where it is left to chance. Each of its tests passes a method that is
worse by the whole margin in 5 of 100 runs; as all of them must pass, none needs a correction.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from specbench import metrics
from specbench.columns import losslessness, number, percent
from specbench.comparable import MACHINE
from specbench.records import BASELINE, RequestRecord, Run
from specbench.stats import MIN_CLUSTERS, Floats, jackknife, ratio_of_rates, speed_up

_LEVEL = 0.9
"""Of an interval that leaves 5 % to each side."""
_NOT_TOKEN_BY_TOKEN = {"law", "lossy"}


class Verdict(StrEnum):
    """From the worst to the best."""

    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    PASS = "PASS"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One question to a method on a workload, and its answer.

    Args:
        is_hard: whether the answer is exact.
        before: how it was in the baseline, in words.
        now: how it is.
        reason: what else there is to say.
    """

    is_hard: bool
    method: str
    workload: str
    question: str
    before: str
    now: str
    verdict: Verdict
    reason: str = ""


class _Counts(NamedTuple):
    """What became of some requests."""

    num_tokens: int
    num_steps: int
    num_accepted: int
    num_offered: int

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> "_Counts":
        steps = [step for record in records for step in record.steps]
        tokens, accepted, offered = (sum(step[i] for step in steps) for i in (3, 2, 1))
        return cls(tokens, len(steps), accepted, offered)

    @property
    def tau(self) -> float | None:
        return self.num_tokens / self.num_steps if self.num_steps else None

    @property
    def rate(self) -> float | None:
        return self.num_accepted / self.num_offered if self.num_offered else None


_Pairs = Sequence[tuple[RequestRecord, RequestRecord]]
"""What the baseline and the run made of the same requests."""


@dataclass(frozen=True)
class Case:
    """A method on a workload."""

    baseline: Run
    run: Run
    method: str
    workload: str
    margin: float
    untimed: str | None
    """The group of `comparable.GROUPS` by which their times say nothing together, if any."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether the runs are of different machines: then what differs in the last digit may
        differ in the rest."""
        return self.untimed == MACHINE

    def findings(self) -> Iterator[Finding]:
        """Everything that is asked."""
        yield self._lossless()
        yield self._failed()
        if self.method not in self.baseline.info["methods"]:
            yield from self._against_others()
            return
        pairs = self._pairs()
        if self._is_exact:
            yield self._outputs(pairs)
        if self._is_exact and self._is_greedy:
            yield from self._counts(pairs)
        else:
            yield self._tau(pairs)
        yield self._speed_up(self.method, "speed-up")

    def _hard(self, question: str, before: str, now: str, ok: bool, reason: str = "") -> Finding:
        verdict = Verdict.PASS if ok else Verdict.FAIL
        return self._finding(True, question, (before, now), verdict, reason)

    def _same(self, question: str, before: str, now: str, ok: bool, reason: str = "") -> Finding:
        """What the same code gives the same of, but for the rounding of another machine."""
        if ok or not self.is_elsewhere:
            return self._hard(question, before, now, ok, reason)
        words = (before, now)
        reason = f"another machine may round otherwise; --allow {MACHINE} judges all the same"
        return self._finding(True, question, words, Verdict.INCONCLUSIVE, reason)

    def _soft(
        self,
        question: str,
        values: tuple[float | None, float | None],
        sums_CK: Floats,
        statistic: Callable[[Floats], Floats],
    ) -> Finding:
        """Whether a ratio of now to before is no less than 1, but for the margin."""
        verdict = Verdict.INCONCLUSIVE
        if len(sums_CK) < MIN_CLUSTERS:
            reason = f"too few prompts in both: {len(sums_CK)}, a verdict takes {MIN_CLUSTERS}"
        else:
            change = jackknife(sums_CK, statistic, sums_CK[:, 0])
            interval = change.interval(_LEVEL)
            assert interval is not None, "several clusters have a spread"
            reason = f"{change.value:.3f} [{interval.low:.3f}, {interval.high:.3f}] of before"
            if interval.low >= 1 - self.margin:
                verdict = Verdict.PASS
            elif interval.high < 1 - self.margin:
                verdict = Verdict.FAIL
        before, now = map(number, values)
        return self._finding(False, question, (before, now), verdict, reason)

    def _finding(
        self, is_hard: bool, question: str, words: tuple[str, str], verdict: Verdict, reason: str
    ) -> Finding:
        return Finding(
            is_hard=is_hard,
            method=self.method,
            workload=self.workload,
            question=question,
            before=words[0],
            now=words[1],
            verdict=verdict,
            reason=reason,
        )

    def _lossless(self) -> Finding:
        before, now = (
            metrics.count_lossless(run, self.workload, self.method)
            for run in (self.baseline, self.run)
        )
        marks = ["lossy", *(["tie"] if before and self._is_exact else [])]
        worse = any(now.get(mark, 0) > before.get(mark, 0) for mark in marks)
        law_p = metrics.law_p_value(self.run, self.workload, self.method)
        unlawful = law_p is not None and law_p < metrics.LEAST_LAW_P
        ok = bool(now) and "broken" not in now and not worse and not unlawful
        reason = f"not the target's distribution: p {law_p:.2g}" if unlawful else ""
        return self._hard("lossless", losslessness(before), losslessness(now), ok, reason)

    def _failed(self) -> Finding:
        before, now = (
            metrics.count_failures(run, self.workload, self.method)
            for run in (self.baseline, self.run)
        )
        return self._hard("failed requests", f"{before}", f"{now}", now <= before)

    @property
    def _is_exact(self) -> bool:
        """Whether the same code gives the same outputs in both runs."""
        ours, theirs = self.baseline.info["target"], self.run.info["target"]
        same = ours.get("dtype") == theirs.get("dtype")
        return same and all(t.get("dtype") == "float32" or t.get("bitwise") for t in (ours, theirs))

    @property
    def _is_greedy(self) -> bool:
        return not any(
            record.decoding.get("temperature")
            for record in self.run.references
            if record.workload == self.workload
        )

    def _pairs(self) -> _Pairs:
        before, now = (
            {
                record.request: record
                for record in run.requests
                if (record.workload, record.method) == (self.workload, self.method)
            }
            for run in (self.baseline, self.run)
        )
        return [(before[name], now[name]) for name in before if name in now]

    def _outputs(self, pairs: _Pairs) -> Finding:
        compared = [
            before.tokens == now.tokens
            for before, now in pairs
            if not {before.lossless, now.lossless} & _NOT_TOKEN_BY_TOKEN
        ]
        before, now = f"{len(compared)} outputs", f"{sum(compared)} equal"
        return self._same("output tokens", before, now, all(compared))

    def _counts(self, pairs: _Pairs) -> Iterator[Finding]:
        before, now = (_Counts.of(pair[i] for pair in pairs) for i in (0, 1))
        fewer = now.num_steps <= before.num_steps
        yield self._same("target forwards", f"{before.num_steps}", f"{now.num_steps}", fewer)
        was, is_ = before.tau or 1.0, now.tau or 1.0
        better = "better; file a new baseline" if is_ > was else ""
        yield self._same("tau", number(was, 4), number(is_, 4), is_ >= was, better)
        # More committed tokens are worth more guesses.
        ok = is_ > was or (now.rate or 0.0) >= (before.rate or 0.0)
        yield self._same("acceptance", percent(before.rate, 2), percent(now.rate, 2), ok)

    def _tau(self, pairs: _Pairs) -> Finding:
        """Committed tokens per step, where chance has a say in them."""
        taus = (_Counts.of(pair[0] for pair in pairs).tau, _Counts.of(p[1] for p in pairs).tau)
        if pairs and all(before.steps == now.steps for before, now in pairs):
            words = (number(taus[0]), number(taus[1]))
            return self._finding(False, "tau", words, Verdict.PASS, "the same steps")
        batches: dict[tuple[str, ...], Floats] = {}
        for before, now in pairs:
            ours, theirs = _Counts.of([now]), _Counts.of([before])
            sums = (ours.num_tokens, ours.num_steps, theirs.num_tokens, theirs.num_steps)
            batches[(now.request,)] = np.array(sums, dtype=np.float64)
        return self._soft("tau", taus, self._clusters(batches), ratio_of_rates)

    def _clusters(self, batches: dict[tuple[str, ...], Floats]) -> Floats:
        return metrics.sum_clusters(batches, metrics.request_names(self.run, self.workload))

    def _speed_up(self, other: str, question: str) -> Finding:
        """Against a method's speed-up in the baseline."""
        before, now = (
            metrics.pair_batches(run, self.workload, name)
            for run, name in ((self.baseline, other), (self.run, self.method))
        )
        shared = {b: np.concatenate([now[b], before[b]]) for b in before if b in now}
        sums_C8 = self._clusters(shared)
        values = (
            (float(ratio_of_rates(sums_C8.sum(0)[4:])), float(ratio_of_rates(sums_C8.sum(0)[:4])))
            if len(sums_C8)
            else (None, None)
        )
        if self.untimed:
            words = (number(values[0]), number(values[1]))
            reason = f"not the same {self.untimed}; --allow {self.untimed} judges all the same"
            return self._finding(False, question, words, Verdict.INCONCLUSIVE, reason)
        return self._soft(question, values, sums_C8, _ratio_of_speed_ups)

    def _against_others(self) -> Iterator[Finding]:
        """A method that the baseline does not know."""
        yield self._beside(BASELINE, f"speed beside {BASELINE}")
        if best := self._best_of_its_kind():
            question = f"speed beside {best}, the best of its kind"
            if best in self.run.info["methods"]:
                yield self._beside(best, question)
            else:
                yield self._speed_up(best, question)

    def _beside(self, other: str, question: str) -> Finding:
        """Against another method of the same run."""
        batches = metrics.pair_batches(self.run, self.workload, self.method, other)
        sums_C4 = self._clusters(batches)
        now = float(ratio_of_rates(sums_C4.sum(0))) if len(sums_C4) else None
        return self._soft(question, (1.0, now), sums_C4, ratio_of_rates)

    def _best_of_its_kind(self) -> str | None:
        """The fastest of the baseline's methods that need weights of their own, or that need none,
        as this one does."""
        kind = _has_weights(self.run, self.method)
        found = {}
        for name in self.baseline.info["methods"]:
            pairs = metrics.pair_times(self.baseline, self.workload, name)
            marks = metrics.count_lossless(self.baseline, self.workload, name)
            if name == BASELINE or "broken" in marks or "lossy" in marks or not len(pairs):
                continue
            if _has_weights(self.baseline, name) == kind:
                found[name] = speed_up(pairs).value
        return max(found, key=lambda name: found[name], default=None)


def _has_weights(run: Run, method: str) -> bool:
    return bool(run.info["methods"][method].get("extra_bytes"))


def _ratio_of_speed_ups(sums_K8: Floats) -> Floats:
    ratio: Floats = ratio_of_rates(sums_K8[..., :4]) / ratio_of_rates(sums_K8[..., 4:])
    return ratio
