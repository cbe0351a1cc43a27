"""ViT-MAE by itself: its sizes, its masks, its loss, what it costs, and transformers' as oracle."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.checkpoint.weights.extras import Extras
from torchtitan.checkpoint.weights.hugging_face_files import HuggingFaceWeights, write_hugging_face
from torchtitan.checkpoint.weights.network import Network
from torchtitan.checks import load_job
from torchtitan.config import ConfigError, RecipeError
from torchtitan.data import DataConfig
from torchtitan.data.order import Document, Position
from torchtitan.models.spec import build_empty, initialize
from torchtitan.research.vit_mae.images.source import ImageSample
from torchtitan.research.vit_mae.masked_autoencoder import MaskedAutoencoder, mask_order, normalized
from torchtitan.research.vit_mae.model import ViTMAE, patchify, take, unpatchify
from torchtitan.research.vit_mae.spec import VIT_MAE, flops_per_unit
from torchtitan.tools.inference import require_text

PUBLISHED = {"base": 87, "huge": 635, "1B": 914, "3B": 3067, "5B": 5349, "15B": 14720}
"""Millions of parameters of the encoder, arXiv:2404.11706."""
ARGS = dataclasses.replace(VIT_MAE.flavors["debugmodel"], image_size=16)
N = ARGS.patches


def network(args=ARGS):
    """With weights of which none is zero or one."""
    made = ViTMAE(args)
    initialize(made.named_parameters(), lambda name: 0.1, seed=0)
    return made


def reconstructed(model, images, order):
    """What is predicted of every patch (B, N, P), in the order of the image."""
    seen = take(patchify(images, 4), order[:, : ARGS.visible])
    return model._predict(model._decode(model._encode(seen, order), order)[:, 1:])


def batch(images=2):
    packing = MaskedAutoencoder(VIT_MAE.settings(), ARGS).packing(DataConfig(), 1, seed=0)
    documents = (
        Document(Position(0, number), ImageSample(torch.rand(3, 16, 16), 0, number))
        for number in range(images)
    )
    lane = packing.lane(0, documents, None)
    return packing.collate([lane.next_sample() for _ in range(images)]).to("cpu")


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_the_encoder_has_the_published_number_of_parameters(flavor):
    model = build_empty(VIT_MAE.build, VIT_MAE.flavors[flavor], 1)
    encoder = [
        weight.numel()
        for name, weight in model.named_parameters()
        if name.startswith(("embeddings.", "layers.", "bridge.norm."))
    ]
    table = model.embeddings.positions.table.numel()
    assert sum(encoder) + table == pytest.approx(PUBLISHED[flavor] * 1e6, rel=0.015)


@pytest.mark.parametrize(
    ("ratio", "visible"), [(0.75, 49), (0.5, 98), (0.9, 19), (0.995, 0), (0.25, 147)]
)
def test_the_visible_part_is_exact(ratio, visible):
    args = dataclasses.replace(VIT_MAE.flavors["base"], mask_ratio=ratio)
    assert (args.visible, args.masked) == (visible, 196 - visible)
    assert dataclasses.replace(args, image_size=160, mask_ratio=0.9).visible == 10


def test_masks_follow_from_seed_epoch_and_number_alone():
    order = mask_order(3, 1, 7, N)
    assert torch.equal(order, mask_order(3, 1, 7, N))
    assert sorted(order.tolist()) == list(range(N))
    others = [mask_order(*each, N) for each in ((4, 1, 7), (3, 2, 7), (3, 1, 8))]
    assert not any(torch.equal(order, other) for other in others)
    seen = torch.stack([mask_order(0, 0, number, N)[: ARGS.visible] for number in range(2000)])
    share = torch.bincount(seen.flatten(), minlength=N) / 2000
    assert (share - 0.25).abs().max() < 0.05


def test_shuffled_patches_go_back_to_their_places():
    images = torch.randn(2, 3, 16, 16)
    patches = patchify(images, 4)
    order = torch.stack([mask_order(0, 0, number, N) for number in range(2)])
    assert torch.equal(take(take(patches, order), order.argsort(1)), patches)
    assert torch.equal(unpatchify(patches, 4), images)
    assert torch.equal(patches[:, 1], images[:, :, :4, 4:8].flatten(1))
    found = batch()
    assert found.visible.shape == (2, N // 4, 48)
    assert found.targets.shape == (2, N - N // 4, 48)
    whole = found.images(4)
    assert torch.equal(
        patchify(whole, 4).gather(1, found.order[..., None].expand(-1, -1, 48))[:, : N // 4],
        found.visible,
    )


def test_the_loss_is_of_masked_patches_alone():
    model, found = network(), batch()
    images = found.images(4)
    every = reconstructed(model, images, found.order)
    of_masked = model(found.visible, found.order)
    hidden = found.order[:, ARGS.visible :]
    assert torch.allclose(take(every, hidden), of_masked, atol=1e-5)
    loss = MaskedAutoencoder.loss(of_masked, found.targets)
    expected = (of_masked - normalized(found.targets)).square().mean((1, 2)).sum()
    assert loss.item() == pytest.approx(expected.item())
    # What is predicted of visible patches gets no gradient, whatever the last layer does there.
    every.retain_grad()
    MaskedAutoencoder.loss(take(every, hidden), found.targets).backward()
    assert take(every.grad, found.order[:, : ARGS.visible]).abs().max() == 0.0
    mean, deviation = normalized(found.targets).mean(-1), normalized(found.targets).std(-1)
    assert mean.abs().max() < 1e-5
    assert (deviation - 1).abs().max() < 1e-3


def test_features_see_the_whole_image():
    model = network()
    images = torch.randn(2, 3, 16, 16)
    features = model.encode(images)
    assert features.shape == (2, N + 1, ARGS.dim)
    changed = images.clone()
    changed[:, :, -1, -1] += 1.0
    assert (model.encode(changed)[:, 0] - features[:, 0]).abs().max() > 1e-6


@pytest.mark.gate
def test_operations_are_those_that_are_made():
    model, found = network(), batch(4)
    with FlopCounterMode(display=False) as counter:
        loss = MaskedAutoencoder.loss(model(found.visible, found.order), found.targets)
        loss.backward()
    # The first matrix has no gradient of its inputs, which is counted for all.
    spared = 2 * ARGS.visible * ARGS.patch_numbers * ARGS.dim
    made = counter.get_total_flops() / 4 + spared
    # On a CPU attention may be made of other products; half of it more, or none.
    assert flops_per_unit(ARGS, 1) == pytest.approx(made, rel=0.2)


def test_a_length_of_sequences_does_nothing_and_that_is_said():
    flags = ["--model.name=vit_mae", "--data.dataset=scenes", "--training.seq_len=64"]
    (notice,) = load_job(None, flags, 1, "cpu").notices
    assert "training.seq_len: got 64; samples of vit_mae are not sequences" in notice


def test_a_key_of_text_is_unknown():
    with pytest.raises(RecipeError, match="unknown key of vit_mae"):
        load_job(None, ["--model.name=vit_mae", "--model.tokenizer_path=x"], None, "cpu")


class Weights:
    """Those of a network, as a source to write from."""

    def __init__(self, model):
        self.model = model

    def shapes(self):
        return {f"model.{n}": (p.dtype, tuple(p.shape)) for n, p in self.model.named_parameters()}

    def read(self, name, offsets=None, sizes=None):
        return self.model.get_parameter(name.removeprefix("model.")).detach()


@pytest.mark.gate
def test_transformers_computes_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = network()
    source = Weights(model)
    write_hugging_face(tmp_path, source, Network(VIT_MAE, ARGS), Extras())
    theirs = transformers.ViTMAEForPreTraining.from_pretrained(tmp_path).eval()
    images, noise = torch.randn(2, 3, 16, 16), torch.rand(2, N)
    order = noise.argsort(1)
    with torch.no_grad():
        expected = theirs(images, noise=noise)
        found = reconstructed(model, images, order)
        shuffled = take(patchify(images, 4), order)
        outputs = model(shuffled[:, : ARGS.visible], order)
    # A patch there has its channels together for each pixel.
    ours = found.unflatten(-1, (3, 16)).transpose(-1, -2).flatten(-2)
    assert (ours - expected.logits).abs().max() < 1e-5
    loss = MaskedAutoencoder.loss(outputs, shuffled[:, ARGS.visible :]) / 2
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)

    back = HuggingFaceWeights(tmp_path, [VIT_MAE])
    assert back.network.args == dataclasses.replace(
        ARGS, pixel_mean=back.network.args.pixel_mean, pixel_std=back.network.args.pixel_std
    )
    for name, weight in model.named_parameters():
        assert torch.equal(back.read(f"model.{name}"), weight), name
    assert not (tmp_path / "generation_config.json").exists()


def test_weights_with_another_table_of_positions_are_refused(tmp_path):
    source = Weights(network())
    turned = dataclasses.replace(
        VIT_MAE.formats["hf"],
        constants=lambda args: {
            name: table.roll(ARGS.dim // 2 if table.shape[-1] == ARGS.dim else 16, -1)
            for name, table in VIT_MAE.formats["hf"].constants(args).items()
        },
    )
    spec = dataclasses.replace(VIT_MAE, formats={"hf": turned})
    write_hugging_face(tmp_path, source, Network(spec, ARGS), Extras())
    with pytest.raises(ConfigError, match="position_embeddings differs from the fixed values of"):
        HuggingFaceWeights(tmp_path, [VIT_MAE])


def test_a_model_of_images_has_no_text_to_generate():
    with pytest.raises(ConfigError, match=r"run: vit_mae is trained on images, .* a model of text"):
        require_text(Path("run"), Network(VIT_MAE, ARGS))
