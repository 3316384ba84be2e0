"""Monte Carlo: the ground truth, with error bars."""
