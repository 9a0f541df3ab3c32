"""The queue of rollouts: what is put up, leased and finished, and by which workers."""
