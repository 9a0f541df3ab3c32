"""The values of the queue of rollouts: scenarios that workers lease, run and complete."""
