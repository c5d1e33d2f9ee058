"""Images, a folder for each class. Only the machine that launches a job needs Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fusion.runtime.datasets.dataset import Array, ReportLine, require_room, with_progress
from fusion.runtime.job.errors import JobError

IMAGES, LABELS = "images", "labels"
CHANNELS = 3
# Modes of Pillow's, of which it makes RGB by cutting off what is above 255.
_WIDE = ("I", "F")


class ImageFolders:
    """`size`: height and width that every image is scaled to; `classes`: the names that labels index, if they are given. Hidden files
    and folders are skipped."""

    names = (IMAGES, LABELS)

    def __init__(
        self, path: Path, size: tuple[int, int], classes: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._path = path
        self._size = size
        folders = sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
        self.classes = classes or {LABELS: tuple(folder.name for folder in folders)}
        places = {name: label for label, name in enumerate(self.classes[LABELS])}
        for folder in folders:
            if folder.name not in places:
                raise JobError(f"{folder} is of a class that is not trained on")
        self._files = [
            (file, places[folder.name])
            for folder in folders
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ]
        if not self._files:
            raise JobError(f"{path} must hold a folder of images for each class; it holds no such image")

    def read(self, names: Sequence[str], limit_bytes: int, report: ReportLine) -> dict[str, Array]:
        """See `Source`."""
        total, (height, width) = len(self._files), self._size
        labels = np.array([label for _, label in self._files], dtype=np.int64)
        if IMAGES not in names:
            return {LABELS: labels}
        require_room(total * CHANNELS * height * width, limit_bytes, str(self._path))
        images = np.empty((total, CHANNELS, height, width), dtype=np.uint8)
        files = (file for file, _ in self._files)
        for i, file in enumerate(with_progress(files, total, "images", report)):
            images[i] = self._image(file)
        return {name: value for name, value in ((IMAGES, images), (LABELS, labels)) if name in names}

    def _image(self, file: Path) -> Array:
        """uint8 (3, height, width)."""
        try:
            from PIL import Image, ImageOps, UnidentifiedImageError
        except ImportError:
            raise JobError(
                'reading images needs Pillow on this machine: pip install "fusion-peer[images]"'
            ) from None
        height, width = self._size
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith(_WIDE):
                    raise JobError(f"{file} has more than 8 bits a pixel and channel: save its images with 8")
                upright = ImageOps.exif_transpose(opened).convert("RGB")
                scaled = upright.resize((width, height), Image.Resampling.BILINEAR)
        except JobError:
            raise
        except UnidentifiedImageError:
            raise JobError(f"{file} is not an image") from None
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise JobError(f"{file} cannot be read as an image: {str(error)[:200]}") from None
        return np.asarray(scaled, dtype=np.uint8).transpose(2, 0, 1)
