"""Ray Tune by itself: a grid of learning rates."""

import sys

from ray import tune


def objective(config):
    weight = 0.0
    for step in range(20):
        weight += config["lr"] * (1.0 - weight)
        tune.report({"score": abs(1.0 - weight), "step": step})


tuner = tune.Tuner(
    tune.with_resources(objective, {"cpu": 1}),
    param_space={"lr": tune.grid_search([0.01, 0.1, 0.5])},
    run_config=tune.RunConfig(name="search", storage_path=sys.argv[1], verbose=0),
)
results = tuner.fit()
best = results.get_best_result("score", "min")
print(f"{len(results)} trials, {results.num_errors} errors, best lr {best.config['lr']}", flush=True)
