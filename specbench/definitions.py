"""What the words of a report mean; it is printed with the tables."""

from specbench.metrics import LEAST_LAW_P
from specbench.stats import MIN_CLUSTERS
from specbench.workloads import LEAST_TAIL

DEFINITIONS = {
    "tau": "committed tokens / steps over all prompts: the bonus included, tokens behind the end "
    "of the output excluded; vanilla is exactly 1",
    "tau by prompt": "the mean over prompts of each prompt's own tau; it may rank methods "
    "differently",
    "acceptance": "accepted tokens / offered depth, over all steps; it falls with the depth, so "
    "compare it at equal depths only",
    "acceptance at position p": "of the steps that offered a token at depth p and accepted all "
    "before it, with the output not ended there, the share that accepted it; for trees, p is "
    "offered where the deepest path reaches it",
    "speed-up": "vanilla's decode seconds per token / the method's, on the same prompts, as a "
    "ratio of sums; per batch of prompts the median over the rounds that timed both; prefill is "
    "not in it",
    "interval": "95 % for this speed-up alone: jackknife over prompts (over batches where prompts "
    "are decoded together; a prompt's turns stay together) and Student's t of the logarithm; too "
    f"few: under {MIN_CLUSTERS} independent prompts or batches, so no interval",
    "faster / slower": "the speed-up is not 1: where nothing differs, 95 % of all runs say so of "
    "nothing in a section (Holm's correction; an interval may leave out 1 without a verdict); "
    "inconclusive: it may be 1; blind below: the smallest difference that 80 % of such runs find",
    "tokens/s": "committed tokens per second of decoding, per batch the median over rounds",
    "draft / verify / other": "share of the decode time spent drafting, in target forwards, and in "
    "all the rest (bookkeeping)",
    "lossless": "outputs against the reference, token by token: exact; tie (first difference "
    "within the target's numerical tolerance); BROKEN; in law: only the distribution is the "
    "target's, p being that of a test whether the tokens are as surprising to the target as its "
    f"distribution says, NOT in law below {LEAST_LAW_P}; LOSSY: the method does not claim it",
    "rank": "of a method in the leaderboard by speed-up; with BROKEN or LOSSY outputs or without a "
    "speed-up it has none",
    "failed": "requests that could not be decoded: each has a reason and no number",
    "depth": "offered depth per step: levels of the drafted tree, 0 where nothing was drafted",
    "forwards /token": "target forwards / committed tokens; below 1 / tau where rows share them",
    "nodes /token": "drafted nodes / committed tokens",
    "ms /step": "decode time / steps, a step being one target forward and all around it",
    "wasted": "drafted nodes that were not accepted / drafted nodes",
    "FLOPs /vanilla's": "arithmetic of drafting and of all forwards, counted from the shapes of "
    "what ran, over that of the same output without drafts; always above 1 where something was "
    "rejected; on rejected: the share of it that went into drafts that were not accepted",
    "tau if i.i.d.": "(1 - alpha^(depth + 1)) / (1 - alpha), alpha being the acceptance of a token "
    "once it is reached; by position: 1 + the sum of the products of the acceptances at position "
    "1, 2, ...; both forget that outputs end in the middle of a step",
    "ideal ms": "for each token, if steps cost what vanilla's do: vanilla ms / tau; + draft, + "
    "verify (forwards of more than one node), + other: what they cost beyond vanilla's step",
    "prefill": "per request; no method gains any of it, some add to it",
    "extra": "weights that the method needs beside the target's",
    "entropy": "mean next-token entropy of the target at T=1 along the reference, over all tokens",
    "looping": "share of references that run into a loop, the best case of copying drafters; those "
    f"under {LEAST_TAIL} tokens are too short to tell and do not count",
    "-": "not measured, or not defined for this method",
}
