"""What the image of the pods is made from: this very Shoal, with what it needs. Pure."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of

from cluster.version import version


def containerfile() -> str:
    """A Containerfile for `podman build` and `docker build`, in a directory with Shoal's wheel, if it is not
    to come from a package index."""
    torch = version_of("torch").partition("+")[0]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"""\
# Shoal {version()} with the Python, Ray and torch of the machine that printed this: all nodes need the same.
FROM docker.io/library/python:{python}-slim

# KubeRay's probes ask with wget, and its commands are bash's.
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends bash ca-certificates wget \\
    && rm -rf /var/lib/apt/lists/*

# From a package index. To install a wheel beside this file: --build-arg SHOAL=./NAME.whl, and
#   COPY *.whl ./
ARG SHOAL=shoal=={version()}
RUN pip install --no-cache-dir "$SHOAL" ray=={version_of("ray")} torch=={torch}

# Not root: nothing in a pod needs more than a home and a temporary directory.
RUN useradd --create-home --uid 1000 shoal
USER 1000
WORKDIR /home/shoal
"""
