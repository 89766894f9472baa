"""From gradients to parameters: optimizers, learning-rate schedules, gradient norms and the loss scale."""
