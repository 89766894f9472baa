"""The safetensors files of a model: whether they can take the place of others, and reading them ahead."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from serve_apps.engine.protocol import WeightsError

READ_BYTES = 8 * 1024 * 1024


def read_ahead(model_path: str) -> None:
    """Read a model's weights once, so that loading them soon takes them from memory (the page cache)."""
    for file in sorted(Path(model_path).glob("*.safetensors")):
        with open(file, "rb", buffering=0) as weights:
            while weights.read(READ_BYTES):
                pass


def check_same_shapes(old: str, new: str) -> None:
    """Whether a directory's weights can take the place of another's.

    Raises:
        WeightsError: they are another model's, or not whole.
    """
    try:
        shapes, others = _shapes(Path(old)), _shapes(Path(new))
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"the weights of {new} cannot be read: {error}") from error
    if shapes != others:
        name = next(iter(shapes.items() ^ others.items()))[0]
        raise WeightsError(f"{new} is a model of another shape ({name} differs)")


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor, from the headers of a directory's safetensors files."""
    shapes = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors files")
    for file in files:
        # Opening a file looks at its header, and whether it is whole.
        with safe_open(file, framework="np") as weights:
            names = weights.keys()
            shapes.update({name: tuple(weights.get_slice(name).get_shape()) for name in names})
    return shapes
