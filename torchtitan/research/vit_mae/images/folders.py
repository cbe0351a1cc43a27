"""Folders of image files; subfolders, in the order of their names, are classes."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from torchtitan.config import ConfigError
from torchtitan.data.discovery import fingerprint_files, walk
from torchtitan.remote import refuse_pointer
from torchtitan.research.vit_mae.images.decoding import check_packages, decode
from torchtitan.research.vit_mae.images.settings import ImagesConfig


class ImageFolder:
    """Images in a folder, by number, in the order of their names."""

    def __init__(
        self, root: Path, suffixes: Sequence[str], config: ImagesConfig, bands: int
    ) -> None:
        """
        Args:
            suffixes: suffixes of the files to read; others are ignored.
            bands: number of bands to which a photograph is converted.

        Raises:
            ConfigError: if there are no images, or they do not all have a class.
        """
        if not root.is_dir():
            raise ConfigError(f"{root} is a file; wanted a folder of images")
        self._files = sorted(
            (path.relative_to(root) for path in walk(root) if path.suffix.lower() in suffixes),
            key=Path.as_posix,
        )
        if not self._files:
            raise ConfigError(f"{root} has no images ({', '.join(suffixes)})")
        self._root, self._config, self._bands = root, config, bands
        self.classes = self._classes()
        self.has_classes = bool(self.classes)
        self._labels = {name: number for number, name in enumerate(self.classes)}
        check_packages({path.suffix.lower() for path in self._files})
        files = [root / path for path in self._files]
        for file in files:
            refuse_pointer(file)
        self.fingerprint = fingerprint_files(files, root)

    def _classes(self) -> Sequence[str]:
        loose = [path for path in self._files if len(path.parts) == 1]
        if len(loose) == len(self._files):
            return ()
        if loose:
            raise ConfigError(
                f"{self._root} has images both directly ({loose[0]}) and in subfolders, which "
                "are classes; move all into subfolders, or none"
            )
        filled = {path.parts[0] for path in self._files}
        folders = [each.name for each in self._root.iterdir() if each.is_dir()]
        for name in sorted(folders):
            if name not in filled and not name.startswith("."):
                raise ConfigError(f"{self._root / name} is a class without images; remove it")
        return sorted(filled)

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return str(self._root / self._files[index])

    def image(self, index: int) -> Tensor:
        path, name = self._files[index], self.name(index)
        try:
            content = (self._root / path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: it cannot be read: {error.strerror}") from None
        return decode(content, path.suffix.lower(), name, self._config, self._bands)

    def label(self, index: int) -> int:
        return self._labels[self._files[index].parts[0]]
