"""The algorithms of a training step as pure functions: no files, no processes.

`sequences`: calls to rows of tokens, rows to micro-batches, prefixes computed once (no torch)::

    training_rows    packing of a run's calls into rows, of rows into micro-batches and among ranks
    prefix_tree      which earlier call a prompt extends
    prefix_forest    rows with shared prefixes as a forest, in parts that fit the memory

`loss`: logprobs to the loss of a step (torch only)::

    objective    the loss of a step, micro-batch by micro-batch, over all its updates
    ├── token_losses           logits to logprobs; loss and KL penalty of each token
    ├── own_loss               a loss that the operator has registered
    ├── importance_sampling    sampler against learner: weights and the guard
    └── loss_stats             metrics of a step
    logprob_gap    refuses a step whose tokens another model sampled
    lr_schedule    the learning rate by step
"""
