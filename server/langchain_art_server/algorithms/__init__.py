"""The algorithms of a training step as pure functions: no files, no processes.

`credit`: rewards of runs to an advantage and a loss weight for every call (no torch)::

    batch_plan    what is excluded (no reward, staleness, truncation), credit assignment, weights
    ├── candidates           calls and runs as input; the decision on a call
    ├── credit_assignment    what is compared: runs, nodes, turns, states, scores; zero variance
    │   └── advantages       a reward against the others of its group
    └── loss_weights         the weight of each token in the loss

`sequences`: calls to rows of tokens, rows to micro-batches, prefixes computed once (no torch)::

    training_rows    packing of a run's calls into rows, and of rows into micro-batches
    prefix_tree      which earlier call a prompt extends
    prefix_forest    rows with shared prefixes as a forest; forest_parts: the forest by memory
    rank_shares      rows divided among ranks

`loss`: logprobs to the loss of a step (torch only)::

    objective    the loss of a step, micro-batch by micro-batch, over all its updates
    ├── token_losses           logits to logprobs; loss and KL penalty of each token
    ├── own_loss               a loss that the operator has registered
    ├── importance_sampling    sampler against learner: weights and the guard
    └── loss_stats             metrics of a step
    logprob_gap    refuses a step whose tokens another model sampled
    lr_schedule    the learning rate by step
"""
