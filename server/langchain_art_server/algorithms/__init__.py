"""Pure functions: rewards to advantages, calls to rows, logits to a loss. No files, no processes.

From groups of runs to what each call weighs (no torch)::

    plan        filters, advantages and weights in their order
    ├── candidates    calls and runs, as far as they matter here; the verdict on a call
    ├── filters       what is left out, by reason
    ├── credit        what is compared with what: runs, nodes, turns, states, scores
    │   └── advantages    a reward against the others
    └── aggregation   what a token weighs in the loss

From logprobs to a step (torch and nothing else)::

    step_loss   one step, visit by visit, over all its updates
    └── objective     the weighed loss and divergence, and its stats
        ├── loss          logits to logprobs; a loss for each token
        ├── kl            divergence from the base model
        ├── mismatch      sampler against learner: importance weights, the guard
        └── stats         what it all did
    sync        is what was sampled what is trained?
"""
