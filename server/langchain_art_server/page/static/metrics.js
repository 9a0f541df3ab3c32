/** The numbers of a step, each with a word of help, in the order in which they are shown. */

/** @typedef {{name: string, title: string, help: string}} Metric */

/** @type {Metric[]} */
export const METRICS = [
  ["reward_mean", "Reward", "Mean reward of the runs that this step compared. It should rise."],
  ["held_out", "Held-out reward", "Mean reward on held-out scenarios, which no step learns from, with its 95 % interval: at the step that made the version."],
  ["loss", "Loss", "What the step minimised. With policy gradients it says little by itself."],
  ["grad_norm", "Gradient norm", "How strongly the step pulled at the weights, before clipping."],
  ["overflows", "Overflows", "Updates whose gradient overflowed float16: each was skipped and made again with half of the loss scale."],
  ["kl", "KL, sampler to learner", "How far the learner's probabilities are from those that the tokens were sampled with. Near 0 is right."],
  ["step_kl", "KL of the step", "How far the step moved the policy on its own runs, in nats a token. TrainConfig.max_kl is the most that it may."],
  ["kl_reference", "KL to the reference", "How far the policy is from the reference of its KL penalty, or from its teacher, in nats a token."],
  ["entropy", "Entropy", "How varied the policy's choices are, in nats a token. Near 0, it always says the same."],
  ["logprob_gap_mean", "Sampler–learner gap", "Mean difference between the log-probabilities of sampler and learner. A large one means that they do not run the same model."],
  ["staleness_mean", "Staleness", "How many versions old the trained calls were, on average."],
  ["importance_ess", "Effective sample size", "The share of tokens that count after importance sampling: 1 means all alike."],
  ["truncated_share", "Truncated replies", "The share of the policy's replies that max_tokens cut off. Should it grow, allow more tokens or reward shorter replies."],
  ["tokens_sampled", "Tokens sampled", "Tokens that the policy sampled in the step's runs, trained or not."],
  ["tokens_trained", "Tokens trained", "Sampled tokens that the step learned from."],
  ["calls_trained", "Calls trained", "Model calls that the step learned from."],
  ["rollout_seconds", "Rollout time", "Seconds that the step waited for its runs; little, where they run ahead of the training."],
  ["judge_seconds", "Judging time", "Seconds that the evaluator took to score the runs."],
  ["seconds", "Training time", "Seconds that the learner took for the step."],
  ["swap_seconds", "Swap time", "Seconds until the new version answered calls."],
].map(([name, title, help]) => ({ name, title, help }));
