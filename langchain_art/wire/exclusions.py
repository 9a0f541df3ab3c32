"""Reasons in `TrainResult.excluded`: what each means, and what to do about it."""

from __future__ import annotations

_MEANING = {
    "groups.zero_variance": "all runs of a group have the same reward, so none is better",
    "groups.single": "only one run of a group has a reward, so there is nothing to compare",
    "groups.empty": "no run of a group has a reward and a call that learns",
    "groups.stale": "a call of it was sampled by a version older than max_staleness allows",
    "groups.rolled_back": "a version sampled a call of it that a rollback has discarded since",
    "groups.unjudged": "the evaluator raised",
    "groups.incomplete_pair": "a side of a pair has no token that may be trained, or lacks a reply",
    "groups.equal_pair": "both sides of a pair have the same tokens, so none is better",
    "runs.unscored": "the run has no reward: set run.reward, 0.0 is one",
    "runs.truncated": "the graph was cut off at its recursion limit (mask_truncated)",
    "runs.without_trainable_calls": "the policy sampled no call of it that may be trained",
    "runs.failed": "the rollout raised and had set no reward",
    "runs.without_advantage": "your advantages leave it out",
    "runs.already_trained": "trained on before",
    "calls.already_trained": "trained before, in another run",
    "calls.repeated": "one reply used twice; its first use is trained",
    "calls.frozen": "trainable= does not choose it",
    "calls.other_policy": "sampled by another model than the one that is trained",
    "calls.foreign": "sampled by a model that this server does not serve",
    "calls.lost": "the server has no tokens of it",
    "calls.empty": "nothing was sampled",
    "calls.too_long": "more tokens than the model takes: a larger max_model_len on the server",
    "calls.greedy_decoding": "sampled at temperature 0: set temperature=1 in training",
    "calls.no_choice": "top_k, top_p, a low temperature or a grammar left one token each time",
    "calls.truncated_sampling": "sampled with top_p or top_k, and what these kept is not known",
    "calls.grammar": "a grammar shaped it, and what it allowed is not known",
    "calls.truncated": "cut off at max_tokens (mask_truncated)",
    "calls.single": "no other run of its group has a call to compare it with",
    "calls.unscored": "credit by call: neither it nor its run has a reward",
    "calls.without_advantage": "your advantages leave it out",
    "calls.zero_variance": "the calls that it is compared with fared alike",
    "calls.superseded": "the graph threw it away",
    "calls.superseded_retried": "the graph threw it away: a later attempt took its place",
    "calls.superseded_interrupted": "the graph threw it away: its node was interrupted",
    "calls.superseded_error": "the graph threw it away: the call, or its node, raised",
    "calls.superseded_unchosen": "the graph threw it away: of several choices it took another",
}


def meaning(reason: str) -> str:
    """A reason in words: ``calls.greedy_decoding``, or a call's own ``greedy_decoding``."""
    known = reason if "." in reason else f"calls.{reason}"
    if known.startswith("calls.superseded"):  # a client may give reasons of its own
        return _MEANING.get(known, _MEANING["calls.superseded"])
    return _MEANING.get(known, "see docs/troubleshooting.md, or a newer release's")
