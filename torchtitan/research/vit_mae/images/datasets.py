"""The data sets of images that a recipe can name."""

from torchtitan.data.settings import Dataset

SCENES = Dataset("scenes", "figures with classes, drawn, no download", content="images", drawn=True)
SCENES_VALIDATION = Dataset(
    "scenes", "others like them, held out", split="validation", content="images", drawn=True
)
IMAGE_FOLDER = Dataset(
    "image_folder",
    "photographs under data.dataset_path; subfolders are classes",
    content="images",
    reads_path=True,
)
IMAGE_SHARDS = Dataset(
    "image_shards",
    "tar files under data.dataset_path, as WebDataset's",
    content="images",
    reads_path=True,
)
RASTERS = Dataset(
    "rasters",
    "npy and GeoTIFF files under data.dataset_path, of any number of bands",
    content="images",
    reads_path=True,
)
