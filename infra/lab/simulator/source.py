"""Where a trace comes from: a file in any of the known formats, or a generator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.errors import RequestError
from infra.lab.simulator.generator import Recipe, generate_philly
from infra.lab.simulator.jobs import Trace, stretched
from infra.lab.simulator.published import read_philly, read_pods
from infra.lab.simulator.trace_csv import read_csv

GENERATORS: Mapping[str, Callable[[Recipe], Trace]] = {"philly": generate_philly}
_GENERATED = re.compile(r"^(?P<name>[a-z]+)(:(?P<seed>\d{1,9}))?$")


def trace_of(source: str, recipe: Recipe) -> Trace:
    """The trace in a file, or the one that a generator makes (`philly` or `philly:SEED`).

    Jobs of published formats, which know of no elasticity, are made elastic as those of the generator are:
    the part `recipe.elastic` of them, drawn by the seed.

    Raises:
        RequestError: there is no such file or generator, or it is in no known format.
        ConfigError: a CSV of ours, with every mistake in it.
    """
    path = Path(source)
    generated = _GENERATED.match(source)
    if generated and not path.exists():
        name, seed = generated["name"], generated["seed"]
        if name not in GENERATORS:
            raise RequestError(
                f"{source} is neither a file nor a generator; generators are {', '.join(GENERATORS)}, as"
                " philly or philly:SEED"
            )
        return GENERATORS[name](recipe if seed is None else replace(recipe, seed=int(seed)))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is no text in UTF-8: byte {error.start + 1} is not") from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    heading = text.lstrip().partition("\n")[0]
    if heading.startswith(("[", "{")):
        return _made_elastic(read_philly(text, source), recipe)
    if "num_gpu" in heading and "creation_time" in heading:
        return _made_elastic(read_pods(text, source), recipe)
    return read_csv(text, source)


def _made_elastic(trace: Trace, recipe: Recipe) -> Trace:
    chance = np.random.default_rng(recipe.seed)
    jobs = tuple(stretched(job) if chance.random() < recipe.elastic else job for job in trace.jobs)
    return replace(trace, jobs=jobs)
