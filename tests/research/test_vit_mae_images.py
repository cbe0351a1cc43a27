"""Images: drawn scenes, files made here and what is wrong with them, what is cut from an image, and
the order in which lanes read them."""

import dataclasses
import io
import itertools
import os
import signal
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks import descendants
from tests.reliability.trials import wait_until
from tests.unit.data.test_files import deny
from torchtitan.config import ConfigError, Context, Unreachable
from torchtitan.config.node_files import POINTER
from torchtitan.data import DataConfig
from torchtitan.data.order import Document, Position
from torchtitan.data.stream import DataStream, merge_states
from torchtitan.research.vit_mae.images import decoding
from torchtitan.research.vit_mae.images.crop import Crop, unit
from torchtitan.research.vit_mae.images.decoding import CorruptImage, decode
from torchtitan.research.vit_mae.images.open_images import Scenes, open_images, open_view
from torchtitan.research.vit_mae.images.settings import ImageData, ImagesConfig
from torchtitan.research.vit_mae.images.source import ImageView, ShuffledImages
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


def view(image, config, size, draw):
    crop = Crop(config, size, draw, "x")
    return crop.finish(crop.part(image))


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

    def image(self, index, crop=None):
        if index in self.broken:
            raise CorruptImage(f"{self.name(index)}: bits are missing")
        return super().image(index, crop)


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


PACKING = MaskedPatches(dataclasses.replace(FLAVORS["debugmodel"], image_size=8), seed=0)


def streams(ranks, processes):
    """The streams of all ranks, of a global batch of 8 and microbatches of 2."""
    config = DataConfig(dataset="scenes", num_workers=processes)
    sizes = {"local_batch_size": 2, "accumulation": 4 // ranks, "ranks": ranks}
    return [DataStream(config, broken(4, 9), PACKING, rank=r, **sizes) for r in range(ranks)]


@pytest.mark.parametrize("processes", [1, 4])
def test_processes_do_not_change_the_batches(processes):
    (alone,), (shared,) = streams(1, 0), streams(1, processes)
    with closing(alone), closing(shared):
        for expected, found in itertools.islice(zip(alone, shared, strict=True), 20):
            assert torch.equal(found.pixels, expected.pixels)
            assert torch.equal(found.order, expected.order)


def test_what_is_left_out_is_counted_on_every_layout_and_after_a_resume():
    """With any number of processes."""

    def counted(of_ranks, steps):
        counts, seen = [], set()
        for _ in range(steps):
            for stream in of_ranks:
                for _ in range(4 // len(of_ranks)):
                    seen |= {hash(image.numpy().tobytes()) for image in next(stream).pixels}
            counts.append(sum(stream.left_out() for stream in of_ranks))
        return counts, seen

    one, four = streams(1, 0), streams(4, 1)
    whole, seen = counted(one, 9)
    assert counted(four, 9) == (whole, seen)
    # A lane of 8 has served 9 images: what of the others' sequence cannot be read until the ninth?
    lanes = [[d.content.number in (4, 9) for d in taken(broken(), n, 8, 30)] for n in range(8)]
    ninth = [[i for i, skipped in enumerate(lane) if not skipped][8] for lane in lanes]
    assert whole[-1] == sum(sum(lane[:end]) for lane, end in zip(lanes, ninth, strict=True)) > 9

    first, second = streams(2, 2), streams(4, 0)
    assert counted(first, 4)[0] == whole[:4]
    merged = merge_states([stream.state_dict() for stream in first])
    for stream in second:
        stream.load_state_dict(merged)
    assert counted(second, 5)[0] == whole[4:]
    for stream in (*one, *four, *first, *second):
        stream.close()


def test_a_process_that_is_killed_is_named_and_none_is_left(capfd):
    config = DataConfig(dataset="scenes", num_workers=2)
    own = descendants(os.getpid())

    def started():
        return sorted({*descendants(os.getpid())} - {*own})

    stream = DataStream(
        *(config, broken(), PACKING), local_batch_size=2, accumulation=1, rank=0, ranks=1
    )
    next(stream)
    first, second = started()
    os.kill(first, signal.SIGTERM)  # as a scheduler does, to all of a job
    next(stream)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(Unreachable, match=rf"process {second}, .* was ended by signal 9, perhaps"):
        list(itertools.islice(stream, 2000))  # a socket holds hundreds of such small images
    wait_until(lambda: not started())  # a thread that stops may hold the last reference
    next(stream), next(stream)
    assert len(started()) == 2
    stream.close()
    wait_until(lambda: not started())
    stream._source._images.images.broken = None  # a fault of ours
    with pytest.raises(Unreachable, match="was ended with status 1; its error is above"):
        next(stream)
    assert "TypeError" in capfd.readouterr().err


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


# Files.

PLAIN = ImagesConfig(crop="none", augment=False)


def pixels(number, size=8, bands=3):
    return np.random.default_rng(number).integers(256, size=(size, size, bands), dtype=np.uint8)


def encoded(number, form="png", **other):
    file = io.BytesIO()
    Image.fromarray(pixels(number, **other)).save(file, form)
    return file.getvalue()


def data(path, kind="image_folder", images=PLAIN):
    return ImageData(dataset=kind, dataset_path=str(path), images=images)


@pytest.fixture
def folder(tmp_path):
    """Two classes, cats with three images and ants with two, and what is no image."""
    root = tmp_path / "photographs"
    for number, name in enumerate(["cats/a.png", "cats/b.PNG", "cats/x/c.png", "ants/d.png"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(number))
    (root / "ants/e.jpg").write_bytes(encoded(4, "jpeg"))
    (root / "README.txt").write_text("about")
    (root / "cats/.hidden.png").write_bytes(b"")
    return root


def test_subfolders_are_classes_in_the_order_of_their_names(folder):
    view = open_view(data(folder), size=8, bands=3)
    assert view.images.has_classes
    names = [Path(view.images.name(i)).relative_to(folder).as_posix() for i in range(len(view))]
    assert names == ["ants/d.png", "ants/e.jpg", "cats/a.png", "cats/b.PNG", "cats/x/c.png"]
    assert [view.images.label(i) for i in range(5)] == [0, 0, 1, 1, 1]
    expected = torch.from_numpy(pixels(0)).permute(2, 0, 1)
    assert torch.equal(view[2].image, expected)
    gray = unit(open_view(data(folder), size=8, bands=1)[2].image)
    assert gray.shape == (1, 8, 8)
    assert torch.allclose(gray, unit(expected).mean(0, keepdim=True), atol=0.25)


def test_images_by_themselves_have_no_class(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(0))
    view = open_view(data(tmp_path), size=8, bands=3)
    assert not view.images.has_classes


def test_sixteen_bits_are_kept(tmp_path):
    gray = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(gray).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(encoded(0))
    view = open_view(data(tmp_path), size=8, bands=1)
    assert torch.allclose(view[0].image[0], torch.from_numpy(gray.astype(np.float32) / 65535))
    packing = MaskedPatches(
        dataclasses.replace(FLAVORS["debugmodel"], image_size=8, channels=1), seed=0
    )
    lane = packing.lane(0, (Document(Position(0, n), view[n]) for n in range(2)), None)
    batch = packing.collate([lane.next_sample() for _ in range(2)])
    assert torch.equal(batch.pixels[1], view[1].image / 255), "with bytes in one batch"


def shard(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path):
    root = tmp_path / "shards"
    for number in (1, 0):
        files = {}
        for k in range(3):
            files[f"x/{number}{k}.png"] = encoded(10 * number + k)
            files[f"x/{number}{k}.cls"] = str(k).encode()
            files[f"x/{number}{k}.txt"] = b"what it shows"
        shard(root / f"{number}.tar", files)
    return root


def test_files_of_one_key_make_a_sample(shards):
    view = open_view(data(shards, "image_shards"), size=8, bands=3)
    assert [view.images.label(i) for i in range(len(view))] == [0, 1, 2, 0, 1, 2]
    assert view.images.name(4) == f"{shards / '1.tar'}: x/11.png"
    expected = torch.from_numpy(pixels(11)).permute(2, 0, 1)
    assert torch.equal(view[4].image, expected)
    one = open_view(data(shards / "1.tar", "image_shards"), size=8, bands=3)
    assert torch.equal(one[1].image, expected)


def test_rasters_have_any_number_of_bands(tmp_path):
    values = np.random.default_rng(0).integers(10_000, size=(6, 8, 8), dtype=np.uint16)
    np.save(tmp_path / "a.npy", values)
    chosen = PLAIN.model_copy(update={"bands": (5, 0), "max_value": 10_000.0})
    found = open_view(data(tmp_path, "rasters", chosen), size=8, bands=2)[0].image
    assert torch.allclose(found, torch.from_numpy(values[[5, 0]].astype(np.float32) / 10_000))
    whole = open_view(data(tmp_path, "rasters"), size=8, bands=6)[0].image
    assert torch.allclose(whole, torch.from_numpy(values.astype(np.float32) / 65535))


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_a_geotiff_is_read_band_by_band(planar, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    values = np.random.default_rng(0).random((5, 8, 8), dtype=np.float32)
    stored = values.transpose(1, 2, 0) if planar == "contig" else values
    tifffile.imwrite(
        *(tmp_path / "a.tif", stored),
        photometric="minisblack",
        planarconfig=planar,
        compression="zlib",
        extratags=[(33550, "d", 3, (10.0, 10.0, 0.0), True)],  # a pixel is 10 m
    )
    found = open_view(data(tmp_path, "rasters"), size=8, bands=5)[0].image
    assert torch.equal(found, torch.from_numpy(values))
    (tmp_path / "b.tif").write_bytes((tmp_path / "a.tif").read_bytes()[:-300])
    with pytest.raises(CorruptImage, match=r"b\.tif: it cannot be decoded: "):
        open_view(data(tmp_path, "rasters"), size=8, bands=5)[1]


@pytest.mark.parametrize("bands", [1, 3])
def test_a_jpeg_is_decoded_to_the_size_needed(bands):
    """At a half, a quarter or an eighth, as the whole image: noise to 2 % of the range."""
    shape, mode, file = (300, 420), "RGB" if bands == 3 else "L", io.BytesIO()
    noise = Image.fromarray(pixels(0, size=24)).convert(mode)
    noise.resize(shape[::-1], Image.Resampling.BICUBIC).save(file, "jpeg", quality=95)
    whole = np.array(Image.open(file)).reshape(*shape, bands)
    factors = []
    for size, seed in itertools.product((300, 150, 75, 74, 40, 16), (None, 1, 2, 3)):
        crop, again = (
            Crop(ImagesConfig(), size, None if seed is None else np.random.default_rng(seed), "x")
            for _ in range(2)
        )
        found = decode(file.getvalue(), ".jpg", bands, crop)
        box = again.box(*shape)
        factor = again.reduction(box)
        top, left, height, width = (each // factor * factor for each in box)
        assert found.shape == (bands, height // factor, width // factor)
        full = torch.from_numpy(whole[top : top + height, left : left + width]).permute(2, 0, 1)
        difference = crop.finish(found).float() - again.finish(full).float()
        assert difference.abs().mean() < 0.02 * 255, (size, factor)
        factors.append(factor)
    assert factors[::4] == [1, 2, 4, 4, 4, 8], "of the center"
    assert {*factors} == {1, 2, 4, 8}


@pytest.mark.parametrize("suffix", [".png", ".jpeg", ".webp", ".bmp", ".npy"])
def test_damaged_bytes_are_named_whatever_is_wrong_with_them(suffix):
    """The decoder may also make something of them, but raises nothing else."""
    if suffix == ".npy":
        file = io.BytesIO()
        np.save(file, pixels(0).transpose(2, 0, 1))
        whole = file.getvalue()
    else:
        whole = encoded(0, suffix[1:])
    draw, refused = np.random.default_rng(0), list[str]()
    for trial in range(150):
        damaged = np.frombuffer(whole, np.uint8).copy()
        places = draw.integers(len(whole), size=1 + trial % 5)
        damaged[places] = draw.integers(256, size=len(places))
        end = int(draw.integers(len(whole))) if trial % 3 == 0 else len(whole)
        try:
            decode(damaged[:end].tobytes(), suffix, 3, Crop(ImagesConfig(), 8, None, "x"))
        except CorruptImage as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(message.startswith("x: it ") for message in refused)


def test_a_corrupt_file_is_named_and_left_out_only_if_the_recipe_says_so(folder, caplog):
    broken = folder / "cats/b.PNG"
    broken.write_bytes(encoded(1)[:60])
    source = open_images(data(folder), size=8, bands=3, seed=1)
    with pytest.raises(CorruptImage, match=r"cats/b.PNG: it cannot be decoded: "):
        list(itertools.islice(source.read({0: None}, 1)[0], 5))
    skipping = PLAIN.model_copy(update={"corrupt": "skip"})
    source = open_images(data(folder, images=skipping), size=8, bands=3, seed=1)
    documents = itertools.islice(source.read({0: None}, 1)[0], 12)
    found = [document.content.number for document in documents]
    assert sorted(found) == sorted([0, 1, 2, 4] * 3)
    assert list(source.corrupt) == [str(broken)]


def test_values_that_are_no_numbers_are_corrupt(tmp_path):
    values = np.zeros((2, 8, 8), np.float32)
    values[1, 3, 3] = np.nan
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(CorruptImage, match=r"a\.npy: it has values that are not finite"):
        open_view(data(tmp_path, "rasters"), size=8, bands=2)[0]


def touched(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(0))
    return root


def test_folders_that_cannot_be_read_are_refused_in_words(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow/cats").mkdir(parents=True)
    touched(tmp_path / "hollow", "ants/a.png")
    cases = {
        touched(tmp_path / "mixed", "a.png", "cats/b.png"): "both directly (a.png) and in sub",
        tmp_path / "empty": "has no images (.jpg, .jpeg, .png",
        tmp_path / "hollow": "cats is a class without images",
        tmp_path / "mixed/a.png": "is a file; wanted a folder of images",
        tmp_path / "nowhere": "there is no such file or folder",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_view(data(path), size=8, bands=3)
        assert message in str(caught.value)


def test_shards_that_cannot_be_read_are_refused_in_words(tmp_path):
    image = encoded(0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.tar").write_bytes(b"")
    (tmp_path / "text.tar").write_text("no archive " * 100)
    whole = shard(tmp_path / "whole.tar", {"a.png": image, "b.png": image}).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: 512 + 512 + 512 + 20])
    (tmp_path / "packed.tar.gz").write_bytes(whole)
    cases = {
        tmp_path / "empty": "has no shards (.tar)",
        tmp_path / "zero.tar": "zero.tar: the shard is empty",
        shard(tmp_path / "none.tar", {}): "none.tar: the shard is empty",
        tmp_path / "text.tar": "text.tar: not a complete tar archive",
        tmp_path / "cut.tar": "cut.tar: it is truncated, within b.png",
        tmp_path / "packed.tar.gz": "unpack it to .tar",
        shard(tmp_path / "bare.tar", {"a.txt": b"x"}): "a has no image, only .txt",
        shard(tmp_path / "two.tar", {"a.png": image, "a.jpg": image}): "a has 2 images",
        shard(tmp_path / "mix.tar", {"a.png": image, "b.png": image, "a.cls": b"1"}): "are not adj",
        shard(tmp_path / "some.tar", {"a.png": image, "a.cls": b"1", "b.png": image}): "b.png: it",
    }
    assert len(image) in range(100, 512), "as it is cut above"
    for path, message in cases.items():
        with pytest.raises(ConfigError) as caught:
            open_view(data(path, "image_shards"), size=8, bands=3)
        assert message in str(caught.value), path


def test_what_says_a_class_is_read_when_it_is_asked_for(tmp_path):
    path = shard(tmp_path / "word.tar", {"a.png": encoded(0), "a.cls": b"cat"})
    view = open_view(data(path, "image_shards"), size=8, bands=3)
    assert view[0].image.shape == (3, 8, 8)
    with pytest.raises(ConfigError, match=r"word\.tar: a\.cls: got 'cat'; wanted the number"):
        view.images.label(0)


def test_a_band_that_is_not_there_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 8, 8), np.uint8))
    config = data(tmp_path, "rasters", PLAIN.model_copy(update={"bands": (0, 2)}))
    with pytest.raises(ConfigError, match=r"it has 2 bands, .* selects band 2, counted from 0"):
        open_view(config, size=8, bands=2)[0]


def test_a_decoder_that_is_not_installed_is_named(folder, monkeypatch):
    monkeypatch.setitem(decoding.PACKAGES, "pillow", ("no_such_module", decoding.PHOTOGRAPHS))
    message = r'pillow, which decodes \.jpg and \.png files, is not installed: pip install "pill'
    with pytest.raises(ConfigError, match=message):
        open_view(data(folder), size=8, bands=3)


def test_settings_of_images_are_refused_together():
    config = ImagesConfig(crop="none", min_area=0.5, flips=("vertical", "vertical"), bands=(-1,))
    found = {problem.path for problem in config.problems(Context())}
    assert found == {"min_area", "flips", "bands"}


@pytest.mark.parametrize("kind", ["image_folder", "image_shards"])
def test_odd_files_are_named(kind, tmp_path, monkeypatch):
    def find(path):
        open_view(data(path, kind), size=8, bands=3)

    odd = tmp_path / "one/b.tar"
    odd.parent.mkdir()
    (tmp_path / "one/a.jsonl").write_text("{}")
    odd.symlink_to("/nowhere/b.tar")
    with pytest.raises(ConfigError, match=r"one/b\.tar: it is a link to /nowhere/b\.tar, which"):
        find(tmp_path)
    odd.unlink()
    os.mkfifo(odd)
    with pytest.raises(ConfigError, match=r"one/b\.tar: it is neither a file nor a folder"):
        find(tmp_path)
    odd.unlink()
    for name in ("c.jpg", "c.tar"):
        (tmp_path / "one" / name).write_bytes(POINTER + b"v1\noid sha256:%064d\nsize 9\n" % 7)
    with pytest.raises(ConfigError, match=r"c\.(jpg|tar): it is only the pointer of a file"):
        find(tmp_path)
    deny(monkeypatch, "one")
    with pytest.raises(ConfigError, match="/one: cannot be read: Permission denied"):
        find(tmp_path)
