"""Autoregressive decoding: the baseline. It drafts nothing and goes through the same loop as every
method."""

from collections.abc import Sequence

from specbench.method import Batch, Budget, Method, Proposal


class Vanilla(Method):
    """One target forward for each token."""

    def propose(self, batch: Batch, budgets: Sequence[Budget]) -> Proposal:
        """The roots alone."""
        return Proposal.nothing(batch.rows)
