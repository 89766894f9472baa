"""Image classification on transformers' own model classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn

from cluster.config.sections.train import TrainJobConfig
from cluster.errors import RequestError
from cluster.models.directory_here import directory_here
from train_jobs.data.images import ImageFacts, ImageSamples, open_images
from train_jobs.data.source import Batch
from train_jobs.tasks.task import Sums
from train_jobs.tasks.weights import cast, export_dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ImageClassification:
    """Builds the model of a job (He et al., Deep Residual Learning, CVPR 2016) and computes its loss.

    Args:
        config: the job.
        data: the run's directory of prepared data.
    """

    unit = "samples"
    collate = None
    builds_on_meta = False

    def __init__(self, config: TrainJobConfig, data: Path) -> None:
        self.config = config
        self.data = data
        self.facts = ImageFacts.read(data)
        self.content = self.facts.content
        self.architecture: PretrainedConfig | None = None

    def build(self) -> PreTrainedModel:
        """The model with its initial weights, fp32, on the CPU; the same on every rank.

        Raises:
            RequestError: model.directory does not hold an image classifier, or one of other classes.
        """
        from transformers import AutoModelForImageClassification, ResNetConfig

        torch.manual_seed(self.config.seed)
        sizes = self.config.model
        if sizes.directory is not None:
            model = self._from_directory(sizes.directory)
        else:
            labels = dict(enumerate(self.facts.labels))
            architecture = ResNetConfig(
                num_channels=len(self.facts.mean),
                embedding_size=sizes.embedding_size,
                hidden_sizes=list(sizes.hidden_sizes),
                depths=list(sizes.depths),
                layer_type=sizes.layer_type,
                id2label=labels,
                label2id={name: index for index, name in labels.items()},
            )
            model = AutoModelForImageClassification.from_config(architecture, dtype=torch.float32)
        self.architecture = model.config
        return model

    def _from_directory(self, directory: str) -> PreTrainedModel:
        from transformers import AutoModelForImageClassification

        try:
            model = AutoModelForImageClassification.from_pretrained(
                directory_here(directory), dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise RequestError(f"model.directory {directory!r} holds no image classifier: {error}") from error
        if model.config.num_labels != len(self.facts.labels):
            raise RequestError(
                f"model.directory {directory!r} knows {model.config.num_labels} classes, the data "
                f"{len(self.facts.labels)}"
            )
        return model

    def samples(self, held_out: bool) -> ImageSamples:
        return open_images(self.config, self.data, held_out)

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        """Summed cross-entropy, and how many classes were right at first guess.

        Args:
            batch: `pixel_values` [samples, channels, height, width] and `labels` [samples].
        """
        logits = model(pixel_values=batch["pixel_values"]).logits.float()
        labels = batch["labels"]
        total = F.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(dim=-1) == labels).sum()
        return Sums(total, len(labels), {"accuracy": right})

    def export(self, weights: dict[str, Tensor], directory: Path) -> None:
        """Write the Hugging Face format: safetensors, config.json and how images are prepared."""
        from transformers import AutoModelForImageClassification, ConvNextImageProcessor

        assert self.architecture is not None, "the model was not built"
        with torch.device("meta"):
            dtype = export_dtype(self.config)
            model = AutoModelForImageClassification.from_config(self.architecture, dtype=dtype)
        model.save_pretrained(directory, state_dict=cast(weights, dtype))
        processor = ConvNextImageProcessor(
            size={"shortest_edge": self.facts.size},
            image_mean=list(self.facts.mean),
            image_std=list(self.facts.std),
        )
        processor.save_pretrained(directory)
