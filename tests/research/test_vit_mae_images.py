"""Images: drawn scenes, what is cut from an image, and the order in which lanes read them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from torchtitan.config import ConfigError
from torchtitan.data import DataConfig
from torchtitan.data.order import Position
from torchtitan.data.stream import DataStream, merge_states
from torchtitan.research.vit_mae.images.decoding import CorruptImage
from torchtitan.research.vit_mae.images.open_images import Scenes, open_images, open_view
from torchtitan.research.vit_mae.images.settings import ImageData, ImagesConfig
from torchtitan.research.vit_mae.images.source import ImageView, ShuffledImages, view
from torchtitan.research.vit_mae.masked_autoencoder import MaskedPatches
from torchtitan.research.vit_mae.spec import FLAVORS


def taken(source, lane, lanes, count):
    return list(itertools.islice(source.read({lane: None}, lanes)[lane], count))


def test_a_scene_is_a_function_of_seed_and_number():
    scenes = Scenes(seed=3, size=24, channels=5)
    image, again = scenes.image(7), Scenes(seed=3, size=24, channels=5, length=9).image(7)
    assert image.shape == (5, 24, 24)
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1
    assert torch.equal(image, again)
    assert scenes.label(7) == Scenes(seed=3, size=9).label(7)
    assert not torch.equal(image, Scenes(seed=4, size=24, channels=5).image(7))
    assert {Scenes().label(index) for index in range(60)} == set(range(len(scenes.classes)))


def test_a_mean_color_does_not_tell_the_class_of_a_scene():
    """The best line through the mean colors of 400 scenes is right on few more than chance."""
    scenes = Scenes(size=16)
    colors = torch.stack([scenes.image(n).mean((1, 2)) for n in range(600)]).double()
    labels = torch.tensor([scenes.label(n) for n in range(600)])
    inputs = torch.cat((colors, colors.square(), torch.ones(600, 1)), 1)
    wanted = torch.nn.functional.one_hot(labels).double()
    weights = torch.linalg.lstsq(inputs[:400], wanted[:400]).solution
    found = (inputs[400:] @ weights).argmax(1) == labels[400:]
    assert found.double().mean() < 0.25


def test_the_order_and_what_is_cut_depend_on_seed_and_epoch_alone():
    config = DataConfig(dataset="scenes")
    source = open_images(config, size=16, bands=3, seed=5)
    one = taken(source, 0, 1, 8)
    four = [taken(source, lane, 4, 2) for lane in range(4)]
    dealt = [four[number % 4][number // 4] for number in range(8)]
    assert [d.position for d in one] == [d.position for d in dealt]
    assert all(
        torch.equal(a.content.image, b.content.image) for a, b in zip(one, dealt, strict=True)
    )
    resumed = next(source.read({0: Position(0, 5)}, 1)[0])
    assert torch.equal(resumed.content.image, one[5].content.image)
    sample = one[0].content
    later = open_view(config, size=16, bands=3).sample(sample.number, epoch=1, seed=5)
    assert not torch.equal(later.image, sample.image)


@pytest.fixture
def ramp():
    """(2, 8, 12): what each pixel holds is where it was."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    return torch.stack((rows / 8, columns / 12))


def test_a_view_from_the_center_is_not_drawn(ramp):
    window = view(ramp, ImagesConfig(crop="window"), 4, None)
    assert torch.equal(window, ramp[:, 2:6, 4:8])
    square = view(ramp, ImagesConfig(), 8, None)
    assert torch.equal(square, ramp[:, :, 2:10])
    half = view(ramp, ImagesConfig(), 4, None)
    assert half.mean() == pytest.approx(square.mean().item(), abs=0.01)


def test_views_are_parts_that_may_be_mirrored(ramp):
    config = ImagesConfig(crop="window", flips=("horizontal", "vertical"))
    found = set()
    for number in range(200):
        cut = view(ramp, config, 4, np.random.default_rng(number))
        by_row, by_column = cut[0, 1, 0] - cut[0, 0, 0], cut[1, 0, 1] - cut[1, 0, 0]
        assert by_row.abs() == pytest.approx(1 / 8)
        assert by_column.abs() == pytest.approx(1 / 12)
        found.add((bool(by_row > 0), bool(by_column > 0), float(cut[1].min())))
    assert len(found) == 4 * 9, "each of 9 columns, mirrored in each of 4 ways"
    areas = []
    for number in range(100):
        cut = view(ramp, ImagesConfig(min_area=0.5), 8, np.random.default_rng(number))
        assert cut.min() >= 0
        assert cut.max() <= 1
        height, width = (float(each.max() - each.min()) for each in cut)
        areas.append(height * width)
    assert 0.3 < min(areas) < 0.5 < max(areas)


@pytest.mark.parametrize(
    ("settings", "size", "message"),
    [
        ({"crop": "none"}, 8, "it has 8 x 12 pixels, but the model takes 8 x 8"),
        ({"crop": "window"}, 9, "too few for a window of 9 x 9"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, size, message, ramp):
    with pytest.raises(ConfigError, match=message):
        view(ramp, ImagesConfig(**settings), size, None)


class Broken(Scenes):
    """Some of its images cannot be decoded."""

    broken: frozenset[int] = frozenset()

    def image(self, index):
        if index in self.broken:
            raise CorruptImage(f"{self.name(index)}: bits are missing")
        return super().image(index)


def broken(*numbers, length=12, corrupt="skip"):
    images = Broken(size=8, length=length)
    images.broken = frozenset(numbers)
    config = ImagesConfig.model_validate({"corrupt": corrupt})
    return ShuffledImages("x", ImageView(images, config, size=8, bands=3), seed=1, shuffle=True)


def test_a_corrupt_image_ends_the_run_by_its_name():
    with pytest.raises(CorruptImage, match="scene 4: bits are missing"):
        taken(broken(4, corrupt="stop"), 0, 1, 12)


def test_a_corrupt_image_is_left_out_of_its_lane_alone(caplog):
    whole, source = broken(), broken(4, 9)
    for lane in range(4):
        expected = [d for d in taken(whole, lane, 4, 24) if d.content.number not in (4, 9)]
        found = taken(source, lane, 4, len(expected))
        assert [d.position for d in found] == [d.position for d in expected]
    assert source.corrupt == {f"scene {n}": f"scene {n}: bits are missing" for n in (4, 9)}, (
        "each is counted once, however often it comes"
    )


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_left_out_is_counted_on_every_layout_and_after_a_resume(threads):
    args = FLAVORS["debugmodel"]
    packing = MaskedPatches(dataclasses.replace(args, image_size=8), seed=0)
    config = DataConfig(dataset="scenes", num_workers=threads)

    def streams(ranks):
        return [
            DataStream(
                *(config, broken(4, 9), packing),
                local_batch_size=2,
                accumulation=4 // ranks,
                rank=rank,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]

    def counted(of_ranks, steps):
        counts, seen = [], set()
        for _ in range(steps):
            for stream in of_ranks:
                for _ in range(4 // len(of_ranks)):
                    batch = next(stream)
                    seen |= {int(image.sum() * 1e4) for image in batch.images(args.patch_size)}
            counts.append(sum(stream.left_out() for stream in of_ranks))
        return counts, seen

    one, four = streams(1), streams(4)
    whole, seen = counted(one, 9)
    assert counted(four, 9) == (whole, seen)
    # A lane of 8 has served 9 images: what of the others' sequence cannot be read until the ninth?
    lanes = [[d.content.number in (4, 9) for d in taken(broken(), n, 8, 30)] for n in range(8)]
    ninth = [[i for i, skipped in enumerate(lane) if not skipped][8] for lane in lanes]
    assert whole[-1] == sum(sum(lane[:end]) for lane, end in zip(lanes, ninth, strict=True)) > 9

    first, second = streams(2), streams(4)
    assert counted(first, 4)[0] == whole[:4]
    merged = merge_states([stream.state_dict() for stream in first])
    for stream in second:
        stream.load_state_dict(merged)
    assert counted(second, 5)[0] == whole[4:]
    for stream in (*one, *four, *first, *second):
        stream.close()


def test_a_lane_of_corrupt_images_alone_ends_the_run():
    with pytest.raises(ConfigError, match="12 documents in a row cannot be read"):
        taken(broken(*range(12)), 0, 1, 1)


def test_settings_that_do_not_fit_the_model_are_refused():
    config = ImageData(dataset="scenes", images=ImagesConfig(bands=(0, 1)))
    message = r"data.images.bands: got \[0, 1\]; wanted 3 bands, as the model takes"
    with pytest.raises(ConfigError, match=message):
        open_view(config, size=8, bands=3)


def test_images_of_other_bands_are_refused():
    images = ImageView(Scenes(channels=4), ImagesConfig(), size=8, bands=3)
    with pytest.raises(
        ConfigError, match=r"scene 2: it has 4 bands, but the model takes 3; select some with data"
    ):
        images.sample(2)
