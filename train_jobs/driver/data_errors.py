"""What may become of a job's data, beside data; how it travels from process to process."""

from __future__ import annotations

from cluster.errors import RequestError, ShoalError


class StoppedError(ShoalError):
    """The job was asked to stop."""


class NotThereError(ShoalError):
    """A node does not see the documents that the driver sees."""


ERRORS: dict[str, type[ShoalError]] = {
    kind.__name__: kind for kind in (ShoalError, RequestError, NotThereError)
}
"""By the name with which they travel; a class before those that derive from it."""
